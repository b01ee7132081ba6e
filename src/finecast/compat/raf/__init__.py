"""RAF's casting rules in finecast: its notation in overrides, its lists as a rule set.

``check_dtype``, ``gen_hint_helper`` and ``PrimType`` stand for RAF's helpers of these names,
so that its rules run unchanged apart from their imports::

    with finecast.rules.override({"raf.op.bias_add": rule}):
        step = finecast.torch.compile(module, rule_set="raf")
"""

from __future__ import annotations

from typing import Final

from finecast.compat.raf.rule_set import (
    PrimType,
    check_dtype,
    gen_hint_helper,
    raf_rules,
    read_override,
)
from finecast.rules.guests import Guest

__all__ = ["GUEST", "PrimType", "check_dtype", "gen_hint_helper"]

GUEST: Final = Guest(override=read_override, rules=raf_rules)
"""How finecast finds RAF's rules."""
