"""Names for ops that are put into an ``ov.Model``."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from finecast.frontends.openvino.bodies import every_op

if TYPE_CHECKING:
    import openvino


class FreshOpNames:
    """Gives names that no op of a model has, each once."""

    def __init__(self, model: openvino.Model) -> None:
        self._taken = {op.get_friendly_name() for op in every_op(model)}

    def __call__(self, name: str) -> str:
        """``name``, or it with a number."""
        numbered = (f"{name}_{i}" for i in itertools.count(1))
        found = next(n for n in itertools.chain([name], numbered) if n not in self._taken)
        self._taken.add(found)
        return found
