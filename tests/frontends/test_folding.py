"""Weights that stand behind ops on constants: they are planned as plain weights are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import finecast
from finecast.engines import get_engine
from finecast.frontends import onnx as frontend
from finecast.frontends.folding import ConstantFolding
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.ops import lookup
from finecast.planning.kept_products import kept_products
from finecast.planning.plan import Decision, Plan
from finecast.planning.planner import Planner
from finecast.rules import Context, permit
from finecast.rules.policy import Policy
from tests.kernels import skip_without_int8

N = 256
RNG = np.random.default_rng(0)
Weights = dict[str, NDArray[Any]]


def _matrix(*shape: int) -> NDArray[np.float32]:
    return RNG.standard_normal(shape).astype(np.float32)


_WHOLE = np.array([N, N])


def _node(*args: Any, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(*args, **attributes)


def _ends() -> Weights:
    return {name: np.array([k]) for name, k in (("from", 0), ("to", N), ("axis", 1))}


def _filled(number: float) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array([number], np.float32))


# Nodes that compute a matrix ``v`` from constants, and the constants.
_BEHIND: dict[str, tuple[list[onnx.NodeProto], Weights]] = {
    "Identity": ([_node("Identity", ["w"], ["v"])], {"w": _matrix(N, N)}),
    "Transpose": ([_node("Transpose", ["w"], ["v"], perm=[1, 0])], {"w": _matrix(N, N)}),
    "Cast": (
        [_node("Cast", ["w"], ["v"], to=onnx.TensorProto.FLOAT)],
        {"w": _matrix(N, N).astype(np.float16)},
    ),
    "Reshape": (
        [_node("Reshape", ["w", "s"], ["v"])],
        {"w": _matrix(N * N), "s": _WHOLE},
    ),
    "Concat": (
        [_node("Concat", ["a", "b"], ["v"], axis=1)],
        {"a": _matrix(N, 8), "b": _matrix(N, N - 8)},
    ),
    "Split": (
        [_node("Split", ["w", "s"], ["u", "v"], axis=1)],
        {"w": _matrix(N, 2 * N), "s": _WHOLE},
    ),
    "Slice": (
        [_node("Slice", ["w", *_ends()], ["v"])],
        {"w": _matrix(N, N + 3), **_ends()},
    ),
    "Gather": (
        [_node("Gather", ["w", "i"], ["v"], axis=0)],
        {"w": _matrix(3, N, N), "i": np.array(-1)},
    ),
    "Mul": (
        [_node("Mul", ["w", "s"], ["v"])],
        {"w": _matrix(N, N), "s": np.array(0.5, np.float32)},
    ),
    "weight norm": (
        [
            _node("ReduceL2", ["w", "axes"], ["length"], keepdims=1),
            _node("Div", ["w", "length"], ["unit"]),
            _node("Mul", ["unit", "g"], ["v"]),
        ],
        {"w": _matrix(N, N), "axes": np.array([0]), "g": _matrix(1, N)},
    ),
    "ConstantOfShape": (
        [_node("ConstantOfShape", ["s"], ["v"], value=_filled(0.3))],
        {"s": _WHOLE},
    ),
    "Constant": (
        [
            _node("Constant", [], ["c"], value=numpy_helper.from_array(_matrix(N, N))),
            _node("Transpose", ["c"], ["v"], perm=[1, 0]),
        ],
        {},
    ),
}
KINDS = tuple(_BEHIND)


def _model(nodes: list[onnx.NodeProto], weights: Weights, opset: int = 18) -> onnx.ModelProto:
    """``y = relu(x @ v)``, with what computes ``v``."""
    product = [
        _node("MatMul", ["x", "v"], ["m"], "product"),
        _node("Relu", ["m"], ["y"], "end"),
    ]
    kind, sizes = onnx.TensorProto.FLOAT, ["n", N]
    graph = helper.make_graph(
        [*nodes, *product],
        "behind",
        [helper.make_tensor_value_info("x", kind, sizes)],
        [helper.make_tensor_value_info("y", kind, ["n", None])],
        [numpy_helper.from_array(np.asarray(a), name) for name, a in weights.items()],
    )
    imports = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    onnx.checker.check_model(model)
    return model


def _prepared(model: onnx.ModelProto, policy: str = "all:fp16") -> frontend.Prepared:
    return frontend.prepare(frontend.from_model(model), Policy.parse(policy))


def _applied(model: onnx.ModelProto, policy: str, **formats: Format) -> onnx.ModelProto:
    """The model with ops in ``formats``, by name; others keep fp32."""
    file = frontend.from_model(model)
    graph = frontend.prepare(file, Policy.parse(policy)).graph
    decisions = tuple(
        Decision(node=n.name, op=n.op, format=formats.get(n.name, Format.FP32))
        for n in graph.float_nodes
    )
    plan = Plan(model=file.digest, policy=policy, opset=18, decisions=decisions)
    return frontend.to_proto(frontend.apply(file, plan).model)


def _converted(model: onnx.ModelProto, policy: str, data: Weights) -> onnx.ModelProto:
    done = finecast.convert(model, policy=policy, data=data, engine="openvino", verify=False)
    assert done.model is not None
    return done.model


def _names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def _run(model: onnx.ModelProto, feeds: Weights) -> NDArray[Any]:
    outputs: Any = ReferenceEvaluator(model).run(None, feeds)
    return outputs[0]


def _computed(model: onnx.ModelProto, value: str) -> NDArray[np.generic]:
    """The constant ``value`` by another run of the model."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    del copy.graph.output[:]
    copy.graph.output.append(onnx.ValueInfoProto(name=value))
    return _run(copy, {"x": np.zeros((1, N), np.float32)})


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_from_constants_is_a_constant(kind: str) -> None:
    model = _model(*_BEHIND[kind])
    graph = _prepared(model).graph
    assert _names(graph) == ["product", "end"]
    weights = graph.read(graph.find("product"), 1)
    assert weights is not None
    assert weights.constant is not None
    assert weights.constant.size == N * N
    assert np.array_equal(weights.constant.read(), _computed(model, "v"))


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        *((kind, "all:int8_weights") for kind in KINDS),
        *((kind, "all:int8") for kind in ("Transpose", "weight norm")),
        ("Cast", "all:int4_weights"),
    ],
)
def test_it_is_quantized_as_a_plain_weight_is(kind: str, policy: str) -> None:
    if policy == "all:int8":
        skip_without_int8()
    model = _model(*_BEHIND[kind])
    plain = _model([], {"v": _computed(model, "v")})
    data = {"x": RNG.standard_normal((64, N)).astype(np.float32)}
    lows = [_converted(m, policy, data) for m in (model, plain)]
    assert [n.op_type for n in lows[0].graph.node] == [n.op_type for n in lows[1].graph.node]
    assert any(t.data_type != onnx.TensorProto.FLOAT for t in lows[0].graph.initializer)
    engine = get_engine("openvino")
    results = [engine.load(low.SerializeToString()).run(data)["y"] for low in lows]
    assert np.array_equal(results[0], results[1])
    sizes = [low.ByteSize() for low in lows]
    assert abs(sizes[0] - sizes[1]) < 300  # names; the weight is in it once


def test_what_no_edit_touches_stays_as_it_was() -> None:
    nodes, weights = _BEHIND["Transpose"]
    low = _applied(_model(nodes, weights), "all:fp16", end=Format.FP16)
    assert [n.op_type for n in low.graph.node] == [
        "Transpose",
        "MatMul",
        "Cast",
        "Relu",
        "Cast",
    ]
    assert [t.name for t in low.graph.initializer] == ["w"]


def _tied() -> onnx.ModelProto:
    """``y = x @ table.T + table[ids]``, as a decoder with a tied head has it."""
    node = _node
    nodes = [
        node("Transpose", ["table"], ["v"], "turn", perm=[1, 0]),
        node("MatMul", ["x", "v"], ["m"], "product"),
        node("Gather", ["table", "ids"], ["rows"], "rows"),
        node("Add", ["m", "rows"], ["y"], "end"),
    ]
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "tied",
        [
            helper.make_tensor_value_info("x", kind, [4, N]),
            helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, [4]),
        ],
        [helper.make_tensor_value_info("y", kind, [4, N])],
        [numpy_helper.from_array(_matrix(N, N), "table")],
    )
    imports = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def test_a_table_that_others_read_as_it_is_stays_shared() -> None:
    exact = _tied()
    low = _applied(exact, "all:fp16", product=Format.FP16, rows=Format.FP16)
    assert {t.name: t.data_type for t in low.graph.initializer} == {
        "table_fp16": onnx.TensorProto.FLOAT16
    }
    feeds = {"x": _matrix(4, N), "ids": np.array([3, 0, 1, 3])}
    y, rounded = (_run(m, feeds) for m in (exact, low))
    assert np.abs(y - rounded).max() < N * np.finfo(np.float16).eps * np.abs(y).max()


def test_the_product_alone_gets_codes_of_a_tied_table() -> None:
    skip_without_int8()
    data = {"x": _matrix(4, N), "ids": np.array([3, 0, 1, 3])}
    low = _converted(_tied(), "matmult:int8", data)
    kinds = {t.name: t.data_type for t in low.graph.initializer}
    assert kinds["table"] == onnx.TensorProto.FLOAT
    assert onnx.TensorProto.INT8 in kinds.values()
    assert "Transpose" not in [n.op_type for n in low.graph.node]


def test_a_saved_model_is_planned_as_the_one_in_memory(tmp_path: Path) -> None:
    """With its constants in another file, too."""
    model = _model(*_BEHIND["Transpose"])
    expected = _computed(model, "v").astype(np.float16)
    onnx.save(
        model,
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="m.bin",
        size_threshold=16,
    )
    finecast.convert(tmp_path / "m.onnx", tmp_path / "low.onnx", policy="all:fp16")
    low = onnx.load(tmp_path / "low.onnx")
    (weights,) = (numpy_helper.to_array(t) for t in low.graph.initializer)
    assert np.array_equal(weights, expected)


def test_quantized_constants_stay_as_they_are() -> None:
    nodes = [
        _node("DequantizeLinear", ["q", "scale"], ["d"]),
        _node("Transpose", ["d"], ["t"], perm=[1, 0]),
        _node("Cast", ["q"], ["c"], to=onnx.TensorProto.FLOAT),
        _node("Mul", ["c", "scale"], ["u"]),
        _node("Add", ["t", "u"], ["v"]),
    ]
    codes = RNG.integers(-128, 128, (N, N)).astype(np.int8)
    model = _model(nodes, {"q": codes, "scale": np.array(0.01, np.float32)})
    assert len(_prepared(model).graph.nodes) == 7


def _hostile() -> Iterator[tuple[str, list[onnx.NodeProto], Weights]]:
    node, w = _node, _matrix(N, N)
    many = np.array([1 << 20, 1 << 20])
    yield "expand", [node("Expand", ["w", "s"], ["v"])], {"w": _matrix(1, 1), "s": many}
    yield "tile", [node("Tile", ["w", "s"], ["v"])], {"w": w, "s": many}
    yield "fill", [node("ConstantOfShape", ["s"], ["v"])], {"s": many}
    negative = np.array([-5, -5])
    yield "negative", [node("ConstantOfShape", ["s"], ["v"])], {"s": negative}
    column, row = _matrix(1 << 13, 1), _matrix(1, 1 << 13)
    yield "outer", [node("Mul", ["w", "u"], ["v"])], {"w": column, "u": row}
    doubled = [node("Add", [f"d{i}", f"d{i}"], [f"d{i + 1}"], f"add{i}") for i in range(60)]
    yield "doubled", [*doubled, node("Identity", ["d60"], ["v"])], {"d0": w}
    beyond = {"w": w, "i": np.array([N])}
    yield "beyond", [node("Gather", ["w", "i"], ["v"])], beyond


def test_results_are_bounded_together_by_what_the_model_has() -> None:
    """A thousand small fills would be stored as gigabytes by a plan's edits."""
    most, size = 1 << 20, 1 << 16
    folding: ConstantFolding[str] = ConstantFolding(most)
    folding.add("shape", 16, "int64")
    fill = lookup("onnx::ConstantOfShape")
    folded = [folding.fold(fill, ["shape"], {f"v{i}": (size, "fp32")}) for i in range(100)]
    assert folded == [True] * (most // size) + [False] * (100 - most // size)
    folding.add("w", most, "fp32")
    turned = [
        folding.fold(lookup("onnx::Transpose"), ["w"], {f"t{i}": (most, "fp32")})
        for i in range(20)
    ]
    assert 4 <= sum(turned) < 20, "a few copies of the model's own constants"


def test_products_of_constants_are_bounded_in_time() -> None:
    for native in ("onnx::MatMul", "aten::mm", "openvino::Einsum", "aten::einsum"):
        for side, folds in ((256, True), (8192, False)):
            folding: ConstantFolding[str] = ConstantFolding()
            size = 4 * side * side
            folding.add("a", size, "fp32")
            folding.add("b", size, "fp32")
            assert folding.fold(lookup(native), ["a", "b"], {"c": (size, "fp32")}) == folds


@pytest.mark.parametrize(
    ("nodes", "weights"), [pytest.param(n, w, id=name) for name, n, w in _hostile()]
)
def test_what_takes_much_memory_or_time_stays_an_op(
    nodes: list[onnx.NodeProto], weights: Weights
) -> None:
    model = _model([], {"v": _matrix(N, N)})
    del model.graph.initializer[:]
    for number, node in enumerate(nodes):
        model.graph.node.insert(number, node)
    model.graph.initializer.extend(
        numpy_helper.from_array(a, name) for name, a in weights.items()
    )
    graph = _prepared(model).graph
    weight = graph.read(graph.find("product"), 1)
    assert weight is not None
    assert weight.constant is None


def test_the_largest_products_that_stay_exact_are_named() -> None:
    nodes = [
        _node("CumSum", ["w", "axis"], ["v"]),
        *(_node("Softmax", ["w"], [f"s{i}"]) for i in range(3)),
        *(_node("Slice", [f"s{i}", "from", "to"], [f"p{i}"]) for i in range(3)),
        *(_node("MatMul", [f"p{i}", "x"], [f"q{i}"], f"small{i}") for i in range(3)),
    ]
    ends = {"from": np.array([0]), "to": np.array([4]), "axis": np.array(0)}
    model = _model(nodes, {"w": _matrix(N, N), **ends})
    graph, policy = _prepared(model).graph, Policy.parse("auto:int8")
    context = Context(graph=graph, policy=policy, casts_around=frozenset(policy.formats))
    planner = Planner(graph=graph, policy=policy, permissions=permit(context))
    products = kept_products(graph, planner.lowest())
    assert products is not None
    assert (products.count, products.node) == (4, "product")
    assert "its weights are computed from constants" in products.why


def test_sizes_of_constants_are_constants() -> None:
    nodes = [
        _node("Shape", ["u"], ["to"], end=1),
        _node("Slice", ["w", "from", "to"], ["v"]),
    ]
    weights = {"w": _matrix(N + 3, N), "u": _matrix(N, 1), "from": np.array([0])}
    graph = _prepared(_model(nodes, weights)).graph
    weight = graph.read(graph.find("product"), 1)
    assert weight is not None
    assert weight.constant is not None
    assert np.array_equal(weight.constant.read(), weights["w"][:N])


def test_random_ops_are_not_folded() -> None:
    folding: ConstantFolding[str] = ConstantFolding()
    folding.add("w", 4096, "fp32")
    made = {"v": (4096, "fp32")}
    for native in ("onnx::RandomNormalLike", "onnx::Dropout", "onnx::DequantizeLinear"):
        assert not folding.fold(lookup(native), ["w"], made)
    assert folding.fold(lookup("onnx::Transpose"), ["w"], made)
    assert "v" in folding


@pytest.mark.parametrize("fmt", ["int8_weights", "int8_weights_bf16"])
def test_the_codes_of_a_tied_table_are_stored_once(fmt: str) -> None:
    """The lookup's codes and those of the product, which reads it transposed, were both."""
    low = _converted(_tied(), f"all:{fmt}", {"x": _matrix(4, N), "ids": np.arange(4)})
    coded = [t for t in low.graph.initializer if t.data_type == onnx.TensorProto.INT8]
    assert [list(t.dims) for t in coded] == [[N, N]]
    by_name = {n.name: n for n in low.graph.node}
    makers = {name: n.op_type for n in low.graph.node for name in n.output}
    assert makers[by_name["rows"].input[0]] == "DequantizeLinear"
    assert makers[by_name["product"].input[1]] == "Transpose"


def test_openvino_runs_both_readers_of_a_tied_table_on_its_codes() -> None:
    done = finecast.convert(_tied(), policy="all:int8_weights", engine="openvino")
    assert done.counts["int8_weights"] == 2
    assert done.verified.relative_error is not None
    assert done.verified.relative_error < 0.05
