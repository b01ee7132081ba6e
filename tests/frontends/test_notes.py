"""What nodes note: lines of the program that are read, and types that a search chose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import finecast
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import TYPE_KEY
from finecast.graph.builder import scope_of, source_line
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.rules.base import DECISION, Reason

OF_RELEASES = (TYPE_KEY, "finecast.kernel_ms", "finecast.reason")
TRACE = """  File "/app/main.py", line 3, in <module>
    net(x)
  File "/app/net.py", line 12, in forward
    return self.fc(x)
"""


def model() -> onnx.ModelProto:
    """Two products, the first as PyTorch's exporter notes it."""
    w = numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "node_linear"),
        helper.make_node("MatMul", ["h", "w"], ["y"], "enc/layer.1/MatMul"),
    ]
    for key, text in {
        "pkg.torch.onnx.stack_trace": TRACE,
        "pkg.torch.onnx.name_scopes": "['', 'enc', 'enc.layer.0', 'linear']",
    }.items():
        nodes[0].metadata_props.add(key=key, value=text)
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 8]) for n in "xy"]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], [w])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def noted(proto: onnx.ModelProto) -> dict[str, dict[str, str]]:
    """The notes on its format of each node that has any."""
    found = {n.name: {p.key: p.value for p in n.metadata_props} for n in proto.graph.node}
    told = {n: {k: v for k, v in of.items() if k in OF_RELEASES} for n, of in found.items()}
    return {name: of for name, of in told.items() if of}


def decided(time_us: float = 12.5) -> Plan:
    """The first op in bf16, the second in fp32, both by costs."""
    plan = finecast.explain(model(), policy="all:bf16").plan
    by = {"decided by": "time", "bf16 us": time_us, "fp32 us": 32.5}
    decisions = [
        replace(
            decision,
            format=fmt,
            reasons=(
                Reason(
                    rule=DECISION,
                    text=f"bf16 saves {32.5 - time_us} us",
                    permits=(fmt.label,),
                    evidence=by,
                ),
            ),
        )
        for decision, fmt in zip(plan.decisions, (Format.BF16, Format.FP32), strict=True)
    ]
    return replace(plan, decisions=tuple(decisions))


def test_scopes_and_lines_of_the_program_are_read() -> None:
    graph = finecast.explain(model(), policy="all:bf16").graph
    first, second = graph.nodes
    assert (first.scope, second.scope) == ("enc.layer.0", "enc/layer.1")
    assert first.source == "/app/net.py:12 in forward: return self.fc(x)"
    assert second.source == ""


@pytest.mark.parametrize(
    ("trace", "line"),
    [
        ("", ""),
        ("no trace", ""),
        ('File "a.py", line 1, in f', "a.py:1 in f"),
        ('File "a.py", line 1, in f\n    x = 1\n', "a.py:1 in f: x = 1"),
        ('File "/v/lib/site-packages/timm/a.py", line 1, in f', "timm/a.py:1 in f"),
        ('File "a.py", line 1, in f\n    ' + "x" * 999, "a.py:1 in f: " + "x" * 287),
    ],
)
def test_the_innermost_line_counts(trace: str, line: str) -> None:
    assert source_line(trace) == line


@pytest.mark.parametrize(
    ("name", "scope"),
    [("a/b.0/op", "a/b.0"), ("a.b.op", "a.b"), ("op", ""), ("/a/op", "/a"), ("/op", "")],
)
def test_a_name_tells_its_scope(name: str, scope: str) -> None:
    assert scope_of(name) == scope


def test_nodes_note_what_a_search_lowered() -> None:
    made = frontend.to_proto(frontend.apply(frontend.from_model(model()), decided()).model)
    onnx.checker.check_model(made)
    assert noted(made) == {"node_linear": {TYPE_KEY: "bf16"}}


def test_plans_of_other_figures_give_the_same_bytes() -> None:
    plans = [decided(time_us) for time_us in (12.5, 13.0)]
    assert plans[0].digest == plans[1].digest
    made = [frontend.apply(frontend.from_model(model()), plan).model for plan in plans]
    first, second = (frontend.to_proto(one).SerializeToString() for one in made)
    assert first == second


def test_a_conversion_by_a_policy_notes_nothing() -> None:
    made = finecast.convert(model(), policy="all:bf16", verify=False).model
    assert not noted(made)
