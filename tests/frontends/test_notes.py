"""What nodes note: the lines of PyTorch's program that are read, and a search's decisions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import finecast
from finecast import api
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx.undo import NOTES
from finecast.graph.builder import scope_of, source_line
from finecast.planning.plan import Plan
from finecast.rules.base import DECISION, Reason

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
    found = {n.name: {p.key: p.value for p in n.metadata_props} for n in proto.graph.node}
    return {name: {k: v for k, v in of.items() if k in NOTES} for name, of in found.items()}


def decided() -> Plan:
    """All ops in bf16; that costs decided it is said of the first one alone."""
    _, plan = api.judge(model(), "all:bf16")
    first, *others = plan.decisions
    why = Reason(
        rule=DECISION,
        text="bf16 saves 20 us" * 30,
        permits=("bf16",),
        evidence={"decided by": "time", "bf16 us": 12.5, "fp32 us": 32.5},
    )
    return replace(plan, decisions=(replace(first, reasons=(why,)), *others))


def test_scopes_and_lines_of_the_program_are_read() -> None:
    graph, _ = api.judge(model(), "all:bf16")
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


def test_nodes_note_what_a_search_decided() -> None:
    plan, given = decided(), frontend.from_model(model())
    made = frontend.to_proto(frontend.apply(given, plan).model)
    onnx.checker.check_model(made)
    notes = noted(made)
    kind, time_ms, reason = NOTES
    assert notes["node_linear"].pop(reason) == ("bf16 saves 20 us" * 30)[:200]
    assert notes["node_linear"] == {kind: "bf16", time_ms: "0.0125"}
    assert not any(of for name, of in notes.items() if name != "node_linear")


def test_another_conversion_takes_the_notes_out() -> None:
    made = frontend.to_proto(frontend.apply(frontend.from_model(model()), decided()).model)
    again = finecast.convert(made, policy="all:fp16", verify=False).model
    assert not any(noted(again).values())


def test_a_conversion_by_a_policy_notes_nothing() -> None:
    made = finecast.convert(model(), policy="all:bf16", verify=False).model
    assert not any(noted(made).values())
