"""Ops that the model itself states to stay as they are keep fp32.

PyTorch's modules do so by ``torch.autocast(enabled=False)`` around them.
"""

from __future__ import annotations

from typing import Final

from finecast.graph import STATED, Node
from finecast.rules.base import KEEP, Context, Rule, Ruling


def _judge(node: Node, context: Context) -> Ruling | None:
    del context
    if STATED not in node.attributes:
        return None
    return Ruling(permits=KEEP, text="the model turns autocast off around it")


STATED_FP32: Final = Rule(name="stated", judge=_judge)
