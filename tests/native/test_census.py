"""What ``inspect --data`` warns of, each planted in a model of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from finecast.frontends import onnx as frontend
from finecast.native.census import count_classes, notes, risks
from finecast.native.observing import observe
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy
from tests.frontends.tools import Array, graph_of, model, parse, tensor


def node(op: str, inputs: str, output: str) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], name=f"n_{output}")


def found(
    proto: onnx.ModelProto, folder: Path, x: Array, low: Format = Format.FP16
) -> tuple[dict[str, str], dict[str, str]]:
    """Warnings by value, and notes."""
    onnx.save(proto, folder / "planted.onnx")
    prepared = frontend.prepare(frontend.load(folder / "planted.onnx"), Policy.parse("none"))
    facts = observe(prepared, lambda: [{"x": x}])
    warned = {r.value: r.text for r in risks(prepared.graph, facts, low)}
    return warned, notes(prepared.graph, facts)


def test_constants_beyond_and_below_the_range(tmp_path: Path) -> None:
    weights = {"big": 7e4, "tiny": 1e-9, "mask": [0, -3.4e38], "fine": 2.0}
    nodes = [node("Mul", f"x {name}", f"y_{name}") for name in weights]
    proto = model(
        nodes,
        {"x": [2]},
        {f"y_{name}": [2] for name in weights},
        [tensor(k, v) for k, v in weights.items()],
    )
    warned, _ = found(proto, tmp_path, np.ones(2, np.float32))
    assert warned["big"] == "constant, largest 7e+04, limit 6.55e+04"
    assert warned["tiny"].startswith("constant, smallest 1e-09")
    assert warned["mask"].startswith("constant, largest 3.4e+38")
    assert "fine" not in warned
    in_bf16, _ = found(proto, tmp_path, np.ones(2, np.float32), Format.BF16)
    assert not in_bf16.keys() & weights.keys()


def test_an_inf_that_the_next_op_hides(tmp_path: Path) -> None:
    nodes = [node("Mul", "x x", "s"), node("Reciprocal", "s", "r"), node("Add", "r x", "y")]
    proto = model(nodes, {"x": [2]}, {"y": [2]})
    warned, said = found(proto, tmp_path, np.array([1000, 1], np.float32))
    assert warned["s"] == "largest 1e+06, limit 3.275e+04; n_r makes a finite number of Inf"
    assert not said
    warned, said = found(proto, tmp_path, np.array([1e25, 1], np.float32))
    assert warned["s"] == "0 NaN and 1 Inf in fp32; n_r makes a finite number of Inf"
    assert said == {"first op to give NaN or Inf in fp32": "n_s"}


def test_a_divisor_of_which_one_element_vanishes(tmp_path: Path) -> None:
    nodes = [node("Mul", "x k", "d"), node("Identity", "d", "moved")]
    nodes += [node("Div", "x moved", "y")]
    proto = model(nodes, {"x": [1000]}, {"y": [1000]}, [tensor("k", 1e-2)])
    x = np.ones(1000, np.float32)
    x[7] = 1e-6
    warned, _ = found(proto, tmp_path, x)
    assert warned["d"] == "a share of 0.001 becomes zero, and n_y divides by it"


def test_the_first_nan_in_fp32(tmp_path: Path) -> None:
    nodes = [node("Sub", "x one", "s"), node("Sqrt", "s", "q"), node("Relu", "q", "y")]
    proto = model(nodes, {"x": [2]}, {"y": [2]}, [tensor("one", 1.0)])
    warned, said = found(proto, tmp_path, np.array([0, 2], np.float32), Format.BF16)
    assert said == {"first op to give NaN or Inf in fp32": "n_q"}
    assert warned["q"] == "1 NaN and 0 Inf in fp32"


# A product before a loop, one in its body, and one in each branch of an If in its body.
LOOP = """g (float[4,4] x, float[4,4] w, int64 n, bool go) => (float[4,4] y) {
  xw = MatMul(x, w)
  a = Loop (n, go, xw) <body = b (int64 i, bool c, float[4,4] s) => (bool d, float[4,4] t) {
    d = Identity(c)
    sw = MatMul(s, w)
    t = If (c) <then_branch = p () => (float[4,4] u) { u = Tanh(sw) },
                else_branch = q () => (float[4,4] v) { v = MatMul(sw, w) }>
  }>
  y = Relu(a)
}"""


def test_what_a_loop_runs_is_counted_once_and_is_a_lower_bound(tmp_path: Path) -> None:
    graph = graph_of(parse(LOOP), tmp_path, "none")
    rows = {row.kind: row for row in count_classes(graph, {})}
    assert rows["matmul"].flops == 3 * 2 * 4 * 4 * 4
    assert (rows["matmul"].nodes, rows["matmul"].uncounted, rows["matmul"].unknown) == (
        3,
        2,
        2,
    )
    assert rows["transcendental"].uncounted == 1
    assert rows["elementwise"].uncounted == 0  # behind the loop


def test_what_an_if_runs_is_no_lower_bound(tmp_path: Path) -> None:
    text = """g (float[4,4] x, bool c) => (float[4,4] y) {
      y = If (c) <then_branch = p () => (float[4,4] u) { u = MatMul(x, x) },
                  else_branch = q () => (float[4,4] v) { v = Tanh(x) }>
    }"""
    graph = graph_of(parse(text), tmp_path, "none")
    assert {row.uncounted for row in count_classes(graph, {})} == {0}
