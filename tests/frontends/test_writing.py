"""What the ONNX frontend writes: each constant its own numbers, each cast once, types kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from finecast.errors import UsageError
from finecast.frontends import onnx as frontend
from finecast.frontends.native_model import with_switches
from finecast.frontends.onnx.definitions import following
from finecast.numbers.formats import Format
from finecast.numbers.rounding import round_to
from finecast.planning.points import SWITCH, Switch
from finecast.rules.policy import Policy
from tests.frontends.tools import convert, convert_file, model, ops, parse, run, tensor

X = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 700), min_size=2, max_size=5), pad=st.integers(0, 64))
def test_external_tensors_keep_their_own_numbers(
    tmp_path: Path, sizes: list[int], pad: int
) -> None:
    """Whatever their offsets in a shared file, and whether or not they are large."""
    names = [f"w{i}" for i in range(len(sizes))]
    nodes = [
        helper.make_node(
            "Add", ["x" if i == 0 else f"t{i - 1}", f"s{i}"], [f"t{i}"], f"add{i}"
        )
        for i in range(len(sizes))
    ]
    sums = [
        helper.make_node("ReduceLogSum", [w], [f"s{i}"], f"sum{i}")
        for i, w in enumerate(names)
    ]
    weights = [
        tensor(w, np.full(n, 2.0**i))
        for i, (w, n) in enumerate(zip(names, sizes, strict=True))
    ]
    last = f"t{len(sizes) - 1}"
    proto = model([*sums, *nodes], {"x": [1]}, {last: [1]}, weights)
    blob = bytearray(pad)
    for weight in proto.graph.initializer:
        offset = len(blob)
        blob += weight.raw_data + bytes(pad)
        length = len(weight.raw_data)
        weight.ClearField("raw_data")
        weight.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", "all.bin"), ("offset", offset), ("length", length)):
            weight.external_data.add(key=key, value=str(value))
    (tmp_path / "all.bin").write_bytes(bytes(blob))
    (tmp_path / "source.onnx").write_bytes(proto.SerializeToString())
    convert_file(tmp_path / "source.onnx", tmp_path / "low.onnx", "all:fp16")
    stored = onnx.load(tmp_path / "low.onnx").graph.initializer
    found = {t.name.removesuffix("_fp16"): onnx.numpy_helper.to_array(t) for t in stored}
    for number, (name, size) in enumerate(zip(names, sizes, strict=True)):
        assert found[name].shape == (size,)
        assert set(found[name].tolist()) == {2.0**number}


def test_one_low_copy_of_a_constant_serves_all_readers(tmp_path: Path) -> None:
    text = """twice (float[2, 4] x) => (float[2, 4] y, float[2, 4] z) <float[4, 4] w> {
      [a] y = MatMul(x, w)
      [b] z = MatMul(x, w)
    }"""
    proto = parse(text)
    proto.graph.initializer.append(tensor("w", np.eye(4)))
    low, _, _ = convert(proto, tmp_path, "all:fp16")
    assert [t.data_type for t in low.graph.initializer] == [onnx.TensorProto.FLOAT16]
    readers = [n.input[1] for n in low.graph.node if n.op_type == "MatMul"]
    assert readers == [low.graph.initializer[0].name] * 2


@pytest.mark.parametrize("apart", [True, False])
def test_a_save_that_fails_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    proto = parse("large (float[2, 64] x) => (float[2, 64] y) <float[64, 64] w> {"
                  " [a] y = MatMul(x, w) }")  # fmt: skip
    proto.graph.initializer.append(tensor("w", np.eye(64)))
    held = ir.from_proto(proto)
    (before,) = (v.const_value for v in held.graph.initializers.values())

    def full(*args: object, **kwargs: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ir, "save" if apart else "to_proto", full)
        with pytest.raises(UsageError, match="No space left"):
            frontend.save(held, tmp_path / "low.onnx", external_data=apart)
    assert [v.const_value for v in held.graph.initializers.values()] == [before]
    assert not list(tmp_path.iterdir())
    frontend.save(held, tmp_path / "low.onnx", external_data=apart)
    (stored,) = onnx.load(tmp_path / "low.onnx").graph.initializer
    assert np.array_equal(onnx.numpy_helper.to_array(stored), np.eye(64))


@pytest.mark.parametrize("declared", [["batch", 4], [None, 4], [2, 4]])
def test_outputs_keep_their_declared_shapes(
    tmp_path: Path, declared: list[int | str | None]
) -> None:
    """Also where the model's own last Cast goes, and what it read becomes the output."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "relu"),
        helper.make_node("Cast", ["a"], ["y"], "last", to=onnx.TensorProto.FLOAT16),
    ]
    proto = model(nodes, {"x": declared}, {"y": declared})
    proto.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    low, _, _ = convert(proto, tmp_path, "all:fp16")
    assert ops(low) == ["Cast", "Relu"]
    assert low.graph.output[0] == proto.graph.output[0]


def scan(opset: int) -> onnx.ModelProto:
    """A running sum over two steps; Scan-8 reads lengths first, and has a batch axis."""
    body = onnx.parser.parse_graph(
        "b (float[4] begin, float[4] v) => (float[4] t, float[4] o)"
        " { t = Add(begin, v) o = Neg(t) }"
    )
    body.node[0].name, body.node[1].name = "add", "neg"
    lead = [1] if opset < 9 else []
    inputs = [*([""] if opset < 9 else []), "s0", "xs"]
    node = helper.make_node("Scan", inputs, ["s", "os"], "scan", body=body, num_scan_inputs=1)
    return model(
        [node],
        {"s0": [*lead, 4], "xs": [*lead, 2, 4]},
        {"s": [*lead, 4], "os": [*lead, 2, 4]},
        opset=opset,
    )


@pytest.mark.parametrize("opset", [8, 9, 17])
def test_the_states_of_a_scan_have_one_type(tmp_path: Path, opset: int) -> None:
    onnx.save(scan(opset), tmp_path / "scan.onnx")
    prepared = frontend.prepare(
        frontend.load(tmp_path / "scan.onnx"), Policy.parse("none:fp16")
    )
    graph = prepared.graph
    names = {v.id: v.name for v in graph.values}
    phis = {
        n.name: [[names[i] for i in ports if i is not None] for ports in (n.inputs, n.outputs)]
        for n in graph.nodes
        if n.op == "phi"
    }
    assert phis == {
        # The start and each step's end come in; each step's begin and the last end go out.
        "scan/phi_state0": [["s0", "t"], ["begin", "s"]],
        "scan/phi_in1": [["xs"], ["v"]],
        "scan/phi_scan1": [["o"], ["os"]],
    }


UNKNOWN = "unknown"


@pytest.mark.parametrize(
    ("inputs", "outputs", "fmt"),
    [
        (("fp32", "fp32"), ("fp32",), Format.FP32),
        (("fp32", UNKNOWN), ("fp32",), None),
        ((UNKNOWN, "fp32"), ("fp32",), None),
        (("fp32", "fp32"), (UNKNOWN,), None),
        (("int64", "int64"), ("int64",), None),
    ],
)
def test_an_op_with_a_port_of_unknown_type_has_no_format(
    inputs: tuple[str, ...], outputs: tuple[str, ...], fmt: Format | None
) -> None:
    flags_in, flags_out, found = following("Add", "", 17, inputs, outputs)
    assert found is fmt
    assert (any(flags_in) or any(flags_out)) == (fmt is not None)


def test_bodies_out_of_order_are_sorted(tmp_path: Path) -> None:
    proto = parse("""chosen (bool c, float[2, 4] x) => (float[2, 4] y) {
      [if] y = If (c) <
        then_branch = t () => (float[2, 4] a) { [one] u = Neg(x) [two] a = Exp(u) },
        else_branch = e () => (float[2, 4] b) { [three] b = Relu(x) }
      >
    }""")
    shuffled = onnx.ModelProto()
    shuffled.CopyFrom(proto)
    body = next(a.g for a in shuffled.graph.node[0].attribute if a.name == "then_branch")
    nodes = [*body.node]
    del body.node[:]
    body.node.extend(reversed(nodes))
    low, _, _ = convert(shuffled, tmp_path, "all:fp16")
    feeds = {"x": X, "c": np.array(True)}
    (want,), (got,) = run(proto, **feeds), run(low, **feeds)
    np.testing.assert_allclose(got, want, rtol=0.01)


def switched(
    proto: onnx.ModelProto, folder: Path, values: list[str], weights: list[str]
) -> onnx.ModelProto:
    """The model with a switch for each value, then for input 1 of each node."""
    onnx.save(proto, folder / "model.onnx")
    prepared = frontend.prepare(
        frontend.load(folder / "model.onnx"), Policy.parse("none:bf16")
    )
    graph = prepared.graph
    ids = {v.name: v.id for v in graph.values}
    read = {
        name: [
            (n.id, i) for n in graph.nodes for i, v in enumerate(n.inputs) if v == ids[name]
        ]
        for name in values
    }
    nodes = {n.name: n.id for n in graph.nodes}
    return ir.to_proto(
        with_switches(
            prepared.roundable(),
            [
                *(Switch(ports=dict.fromkeys(read[v], Format.BF16)) for v in values),
                *(Switch(ports={(nodes[name], 1): Format.BF16}) for name in weights),
            ],
        )
    )


def test_switches_round_what_a_body_gives(tmp_path: Path) -> None:
    proto = parse("""chosen (bool c, float[2, 4] x) => (float[2, 4] y) {
      [if] y = If (c) <
        then_branch = t () => (float[2, 4] a) { [one] a = Neg(x) },
        else_branch = e () => (float[2, 4] b) { [two] b = Abs(x) }
      >
    }""")
    made = switched(proto, tmp_path, ["a"], [])
    for on, expected in ((False, -X), (True, round_to(-X, Format.BF16))):
        (y,) = run(made, x=X, c=np.array(True), **{SWITCH: np.array([on])})
        assert np.array_equal(y, expected)
        (other,) = run(made, x=X, c=np.array(False), **{SWITCH: np.array([on])})
        assert np.array_equal(other, np.abs(X))


def test_switches_round_what_a_body_without_nodes_hands_on(tmp_path: Path) -> None:
    proto = parse("""turns (float[2, 4] x, int64 n, bool c) => (float[2, 4] y) {
      [before] h = Neg (x)
      [loop] z = Loop (n, c, h) <
        body = b (int64 i, bool k, float[2, 4] s) => (bool k, float[2, 4] s) {}>
      [after] y = Neg (z)
    }""")
    made = switched(proto, tmp_path, [], ["loop/phi_state0"])
    for on, expected in ((False, X), (True, round_to(X, Format.BF16))):
        (y,) = run(made, x=X, n=np.array(2), c=np.array(True), **{SWITCH: np.array([on])})
        assert np.array_equal(y, expected)


def test_a_weight_that_units_share_is_switched_for_each(tmp_path: Path) -> None:
    weight = np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)
    proto = parse("""shared (float[2, 4] x) => (float[2, 4] y, float[2, 4] z) <float[4, 4] w> {
      [a] y = MatMul(x, w)
      [b] z = MatMul(x, w)
    }""")
    proto.graph.initializer.append(tensor("w", weight))
    made = switched(proto, tmp_path, [], ["a", "b"])
    exact, low = X @ weight, X @ round_to(weight, Format.BF16)
    assert not np.allclose(exact, low, rtol=1e-6)
    for first in (False, True):
        for second in (False, True):
            y, z = run(made, x=X, **{SWITCH: np.array([first, second])})
            np.testing.assert_allclose(y, low if first else exact, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(z, low if second else exact, rtol=1e-5, atol=1e-6)
