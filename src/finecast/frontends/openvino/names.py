"""Unused names for the ops of an ``ov.Model``."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from finecast.frontends.openvino.bodies import every_op

if TYPE_CHECKING:
    import openvino


class FreshOpNames:
    """Makes names that no op of a model has; each call gives another one."""

    def __init__(self, model: openvino.Model) -> None:
        self._taken = {op.get_friendly_name() for op in every_op(model)}

    def __call__(self, name: str) -> str:
        """``name``; with a number behind it if it is taken."""
        numbered = (f"{name}_{i}" for i in itertools.count(1))
        found = next(n for n in itertools.chain([name], numbered) if n not in self._taken)
        self._taken.add(found)
        return found
