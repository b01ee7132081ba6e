"""What cannot be compiled is refused when it is asked for, not in the first call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import finecast.torch as ft
from finecast import Policy, Scope
from finecast.errors import UsageError


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"policy": "all:int8"}, "int8 is planned for models of ONNX and OpenVINO"),
        ({"policy": "auto:bf16,int8"}, "int8 is planned for models of ONNX and OpenVINO"),
        ({"policy": "all:fp8"}, "fp8 is planned for modules in inference"),
        ({"policy": "all:fp8_e4m3"}, "ops of PyTorch do not compute in fp8_e4m3"),
        ({"policy": "all:mxfp8"}, "no engine here computes in mxfp8"),
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
