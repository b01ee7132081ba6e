"""The interface by which ``fit`` converts models of any framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from finecast.numbers.formats import Format


class Result(Protocol):
    """What ``fit`` returns."""

    @property
    def model(self) -> Any:
        """The converted model, as an evaluation takes it."""
        ...

    @property
    def lowered(self) -> int:
        """How many ops (or modules) are not fp32 any more."""
        ...

    @property
    def products(self) -> int:
        """How many of them are matrix products or convolutions, which gain most when low."""
        ...

    def save(self, root: str | Path) -> None:
        """Write the model to ``root``."""
        ...


class FitSubject(Protocol):
    """A model whose ops have names and can be converted one by one."""

    @property
    def types(self) -> Mapping[str, str]:
        """Type of each convertible op by its name."""
        ...

    @property
    def known(self) -> Mapping[str, str]:
        """Type of each op by its name, convertible or not."""
        ...

    @property
    def original(self) -> Any:
        """The fp32 model, as an evaluation takes it."""
        ...

    def build(self, kept: frozenset[str]) -> Result:
        """The converted model, with the ops ``kept`` left in fp32."""
        ...

    def predictor(self, model: Any) -> Callable[[Any], Any]:
        """A function that gives the outputs of ``model`` on one batch."""
        ...

    def slow(self, low: Format) -> str:
        """Why ``low`` gains nothing on the device; empty if it does."""
        ...
