"""What ``fit`` needs to know of a model, whatever framework it is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from finecast.compat.neural_compressor.mix_precision import Result
from finecast.formats import Format


class Subject(Protocol):
    """A model with named ops that can be converted, each alone."""

    @property
    def types(self) -> Mapping[str, str]:
        """Type of each convertible op by its name."""
        ...

    @property
    def original(self) -> Any:
        """The fp32 model, as an evaluation takes it."""
        ...

    def build(self, kept: frozenset[str]) -> Result:
        """The converted model, with the ops ``kept`` left in fp32."""
        ...

    def predict(self, model: Any, inputs: Any) -> Any:
        """Outputs of ``model`` on one batch."""
        ...

    def slow(self, low: Format) -> str:
        """Why ``low`` should not be used on the device; empty if it may."""
        ...
