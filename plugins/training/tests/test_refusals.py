"""What cannot be compiled is refused when it is asked for, not in the first call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import finecast.torch as ft
from finecast import Policy, Scope
from finecast.errors import UsageError

_WAY_OUT = ".policy.: use one of bf16, fp16, fp8_dynamic_row, tf32"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"policy": "all:int8"}, f"have no plans in int8 {_WAY_OUT}"),
        ({"policy": "auto:bf16,int8"}, f"have no plans in int8 {_WAY_OUT}"),
        ({"policy": "all:fp8"}, f"have no plans in fp8 {_WAY_OUT}"),
        ({"policy": "all:fp8_e4m3"}, f"have no plans in fp8_e4m3 {_WAY_OUT}"),
        ({"policy": "all:mxfp8"}, f"have no plans in mxfp8_e4m3 {_WAY_OUT}"),
        ({"policy": Policy(scope=Scope.LIKE_GRAPPLER)}, "follows Grappler"),
        ({"policy": 5}, "5 is no policy"),
        ({"memory": 5}, "a name is expected for memory"),
        ({"rule_set": 5}, "a name is expected for rule_set"),
        ({"user_rules": [len]}, "a dict is expected for user_rules"),
        ({"user_rules": {"mine": 5}}, "the rule 'mine' is of type int"),
        ({"mode": "max-autotune"}, "unknown argument of compile 'mode'"),
        ({"fullgrph": True}, "did you mean fullgraph"),
    ],
)
def test_it_is_refused_at_once(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ft.compile(torch.nn.Linear(4, 4), **more)
