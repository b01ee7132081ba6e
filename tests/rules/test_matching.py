"""Names in a policy that match nothing in the model are errors."""

from __future__ import annotations

import re
from typing import Any

import pytest

from finecast.errors import UsageError
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy
from finecast.rules.user_rules import check_names
from tests.graph.text import from_text

GRAPH = from_text("""\
input %0 x fp32[4]
node enc/soft softmax onnx::Softmax fp32 (%0) -> (%1 p fp32[4])
node enc/relu relu onnx::Relu fp32 (%1) -> (%2 y fp32[4])
output %2
""")


@pytest.mark.parametrize(
    "named",
    [
        {"include": (re.compile("soft"),), "exclude": (re.compile("^enc/r"),)},
        {"op_formats": {"Softmax": Format.FP32, "relu": Format.FP32}},
        {"op_formats": {"onnx::Relu": Format.FP32}},
        {"io": {"x": Format.BF16, "y": Format.BF16}},
    ],
)
def test_names_of_the_model_pass(named: dict[str, Any]) -> None:
    check_names(Policy(**named), GRAPH)


@pytest.mark.parametrize(
    ("named", "option", "offered"),
    [
        ({"include": (re.compile("enc/sofd"),)}, "--include", "enc/soft"),
        ({"exclude": (re.compile("soft"), re.compile("dec/.*"))}, "--exclude", "enc/soft"),
        ({"op_formats": {"Sofmax": Format.FP32}}, "--op", "use one of Softmax, Relu"),
        ({"op_formats": {"SOFTMAX": Format.FP32}}, "--op", "use one of Softmax, Relu"),
        ({"op_formats": {"Softmax": Format.INT8}}, "--op", "--auto-cast-type bf16,int8"),
        ({"io": {"X": Format.BF16}}, "--io", "use one of x, y"),
        ({"io": {"p": Format.BF16}}, "--io", "use one of x, y"),
    ],
)
def test_others_are_errors_that_give_the_closest(
    named: dict[str, Any], option: str, offered: str
) -> None:
    with pytest.raises(UsageError) as caught:
        check_names(Policy(**named), GRAPH)
    assert caught.value.where == option
    assert offered in str(caught.value)
