"""RAF's casting rules in finecast: its notation in overrides, its lists as a rule set.

``check_dtype``, ``gen_hint_helper`` and ``PrimType`` stand for RAF's helpers of these names,
so that its rules run unchanged apart from their imports::

    with finecast.rules.override({"raf.op.bias_add": rule}):
        step = finecast.torch.compile(module, rule_set="raf")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from finecast.plugin import lazily

if TYPE_CHECKING:
    from finecast_raf.rule_set import PrimType, check_dtype, gen_hint_helper

__all__ = ["PrimType", "check_dtype", "gen_hint_helper"]

__getattr__ = lazily(dict.fromkeys(__all__, "finecast_raf.rule_set"))
