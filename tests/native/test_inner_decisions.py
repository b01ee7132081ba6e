"""The decisions inside a model that its plan changes are counted, by op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import finecast
from finecast.engines.base import Array
from finecast.native.artefact import Decisions
from finecast.native.inner_decisions import _compared, _differing, _free_rows, deciding
from tests.frontends.tools import parse
from tests.graph.text import from_text

WIDTH, EXPERTS, COUNT = 256, 8, 1024


def router(path: Path, *, layer: bool = False) -> Path:
    """A router of tokens to two of eight experts, behind a layer or on the inputs."""
    rng = np.random.default_rng(0)  # the same net whatever other tests ran before
    last = "x"
    nodes: list[onnx.NodeProto] = []

    def add(op: str, read: list[str], made: str | list[str], **given: Any) -> None:
        results = [made] if isinstance(made, str) else made
        nodes.append(helper.make_node(op, read, results, name=results[-1], **given))

    weights: dict[str, Array] = {
        "w": rng.normal(size=(WIDTH, EXPERTS)).astype(np.float32) / 16,
        "layer": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 16,
        "two": np.array([2]),
        "last": np.array([-1]),
        "experts": rng.normal(size=(EXPERTS, WIDTH)).astype(np.float32),
        "row": np.array([1]),
    }
    if layer:
        add("MatMul", [last, "layer"], last := "hidden")
    add("MatMul", [last, "w"], "gate")
    add("Softmax", ["gate"], "shares", axis=-1)
    add("TopK", ["shares", "two"], ["values", "chosen"], axis=-1)
    add("Gather", ["experts", "chosen"], "picked", axis=0)
    add("Unsqueeze", ["values", "last"], "factors")
    add("Mul", ["picked", "factors"], "scaled")
    add("ReduceSum", ["scaled", "row"], "mixed", keepdims=0)
    add("Mul", ["mixed", "x"], "y")
    x, y = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", WIDTH]) for n in ("x", "y")
    )
    used = {name for node in nodes for name in node.input}
    stored = [numpy_helper.from_array(w, n) for n, w in weights.items() if n in used]
    graph = helper.make_graph(nodes, "router", [x], [y], stored)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def tokens() -> dict[str, NDArray[np.float32]]:
    return {"x": np.random.default_rng(1).normal(size=(COUNT, WIDTH)).astype(np.float32)}


def chosen(proto: onnx.ModelProto, tokens: dict[str, Any]) -> Array:
    """The two experts of each token, in the order of their numbers."""
    from onnx.reference import ReferenceEvaluator

    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    del shown.graph.output[:]
    ports = [helper.make_tensor_value_info("chosen", TensorProto.INT64, None)]
    shown.graph.output.extend(ports)
    (found,) = ReferenceEvaluator(shown).run(None, tokens)  # pyright: ignore[reportGeneralTypeIssues]
    return np.sort(np.asarray(found), axis=-1)


def test_a_router_s_tokens_that_go_elsewhere_are_counted(
    tokens: dict[str, Any], tmp_path: Path
) -> None:
    path, output = router(tmp_path / "router.onnx"), tmp_path / "low.onnx"
    done = finecast.convert(path, output=output, policy="all:bf16", data=tokens)
    (found,) = done.verified.decisions
    assert (found.node, found.op, found.shape) == ("chosen", "TopK", (COUNT, 2))
    fp32, low = (chosen(onnx.load(p), tokens) for p in (path, output))
    elsewhere = int((fp32 != low).any(axis=-1).sum())
    assert elsewhere > 0
    # An engine's sums round in another order than the definitions of the ops.
    assert found.changed == pytest.approx(elsewhere, abs=max(2, elsewhere // 2))
    share = f"{100 * found.changed / COUNT:.3g}%"
    text = f"{share} of the 1,024 decisions of chosen (TopK) change"
    assert text in str(done)
    assert done.to_dict()["decisions"][0]["text"] == text


def test_a_router_in_fp32_decides_as_before(tokens: dict[str, Any], tmp_path: Path) -> None:
    done = finecast.convert(router(tmp_path / "router.onnx"), policy="none", data=tokens)
    assert not done.verified.decisions


def test_without_data_no_decision_is_judged(tmp_path: Path) -> None:
    done = finecast.convert(router(tmp_path / "router.onnx"), policy="all:bf16")
    assert not done.verified.decisions


def test_tune_and_its_report_tell_the_share(tokens: dict[str, Any], tmp_path: Path) -> None:
    path = router(tmp_path / "router.onnx", layer=True)
    asked: dict[str, Any] = {"metric": "cosine", "max_drop": 0.5, "target": "avx512-vnni"}
    output = tmp_path / "tuned.onnx"
    result = finecast.tune(path, output=output, data=tokens, policy="auto:int8", **asked)
    assert result.counts["int8"]
    (found,) = result.verified.decisions
    assert found.count == COUNT
    assert found.changed > 0
    assert found.text in str(result)
    report = result.report()
    assert f"{found.text}." in report.content["summary"]["decisions"]
    assert found.text in str(report)
    told = result.to_dict()["decisions"]
    assert told[0]["share"] == found.changed / COUNT


def test_openvino_s_own_models(tokens: dict[str, Any], tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    model = openvino.convert_model(router(tmp_path / "router.onnx"))
    done = finecast.convert(model, policy="all:bf16", data=tokens)
    (found,) = done.verified.decisions
    assert (found.op, found.shape) == ("TopK", (COUNT, 2))
    assert 0 < found.share < 0.1


def test_modules_of_pytorch(tokens: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")

    class Router(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.gate = torch.nn.Linear(WIDTH, EXPERTS)
            self.experts = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH))

        def forward(self, x: Any) -> Any:
            values, picked = torch.topk(torch.softmax(self.gate(x), -1), 2, dim=-1)
            mixed = (self.experts[picked] * values.unsqueeze(-1)).sum(1)
            return mixed * x + (mixed.sum(-1, keepdim=True) > 0).float()

    free = ({0: torch.export.Dim("n")},)
    x = torch.from_numpy(tokens["x"][:32])
    done = finecast.convert(
        Router().eval(),
        policy="all:bf16",
        example_inputs=(x,),
        dynamic_shapes=free,
        data=tokens,
    )
    found = {one.op: one for one in done.verified.decisions}
    assert found["topk"].shape == (COUNT, 2)
    assert found["gt"].shape == (COUNT, 1)
    assert 0 < found["topk"].share < 0.1


def test_models_of_tensorflow(tokens: dict[str, Any], tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    w = tf.constant(
        (np.random.default_rng(0).normal(size=(WIDTH, EXPERTS)) / 16).astype(np.float32)
    )

    class Router(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, WIDTH], tf.float32, name="x")])
        def __call__(self, x: Any) -> Any:
            values, picked = tf.math.top_k(tf.nn.softmax(x @ w), 2)
            return {"y": values * tf.cast(picked, tf.float32)}

    model = Router()
    tf.saved_model.save(model, tmp_path / "router", signatures=model.__call__)
    done = finecast.convert(tmp_path / "router", policy="all:bf16", data=tokens)
    (found,) = done.verified.decisions
    assert (found.op, found.shape) == ("TopKV2", (COUNT, 2))
    assert 0 < found.share < 0.1


# ------------------------------------------------------------------------- which ops decide

GRAPH = (
    "input %0 x fp32[N, 8]\n"
    "input %1 ids int64[N]\n"
    "node product matmul onnx::MatMul fp32 (%0, %0) -> (%2 a fp32[N, 8])\n"
    "node of_input greater onnx::Greater fp32 (%0, %0) -> (%3 b bool[N, 8])\n"
    "node of_low greater onnx::Greater fp32 (%2, %0) -> (%4 c bool[N, 8])\n"
    "node size shape onnx::Shape fp32 (%2) -> (%5 d int64[2])\n"
    "node as_float cast onnx::Cast fp32 (%5) -> (%6 e fp32[2])\n"
    "node of_sizes less onnx::Less fp32 (%6, %6) -> (%7 f bool[2])\n"
    "node of_ids equal onnx::Equal fp32 (%1, %1) -> (%8 g bool[N])\n"
    "node largest arg_max onnx::ArgMax fp32 (%2) -> (%9 h int64[N, 1])\n"
    "node is_first equal onnx::Equal fp32 (%9, %1) -> (%10 i bool[N])\n"
    "node back cast onnx::Cast fp32 (%9) -> (%11 j fp32[N, 1])\n"
    "node far less onnx::Less fp32 (%11, %0) -> (%12 k bool[N, 8])\n"
    "output %4\noutput %12\n"
)


def test_only_floats_that_a_low_op_changes_are_decided_by() -> None:
    graph = from_text(GRAPH)
    low = [n.id for n in graph.nodes if n.name == "product"]
    assert [n.name for n in deciding(graph, low)] == ["of_low", "largest", "far"]
    assert not [*deciding(graph, [])]
    low = [n.id for n in graph.nodes if n.name == "of_input"]
    assert [n.name for n in deciding(graph, low)] == ["of_input"]


NATIVE = {"non_zero": "NonZero", "non_max_suppression": "NonMaxSuppression"}


@pytest.mark.parametrize(
    ("op", "got", "wanted", "changed", "count"),
    [
        ("top_k", [[3, 1], [2, 5]], [[1, 3], [2, 4]], 1, 2),  # order does not count
        ("top_k", [[0, 1, 2], [1, 0, 2]], [[0, 1, 2], [0, 1, 2]], 2, 6),  # a sort
        ("arg_max", [1, 2, 3], [1, 2, 4], 1, 3),
        ("greater", [[True, False]], [[False, False]], 1, 2),
        ("non_zero", [[0, 2, 5]], [[0, 1, 2, 5]], 1, 4),  # its places are columns
        ("non_zero", [[0, 3, 5]], [[0, 1, 5]], 1, 3),
        ("non_max_suppression", [[0, 0, 7], [0, 0, 1]], [[0, 0, 1], [0, 0, 7]], 0, 2),
        ("non_max_suppression", np.zeros((0, 3), int), [[0, 0, 1]], 1, 1),
        ("unique", [4, 2, 1], [1, 2, 3], 1, 3),
    ],
)
def test_what_counts_as_another_decision(
    op: str, got: Any, wanted: Any, changed: int, count: int
) -> None:
    graph = from_text(
        "input %0 x fp32[8]\n"
        f"node n {op} onnx::{NATIVE.get(op, 'Op')} fp32 (%0) -> (%1 y int64)\n"
        "output %1\n"
    )
    rows = _free_rows(graph, 1)
    got, wanted = np.array(got), np.array(wanted)
    assert _differing(graph.nodes[0], got, wanted, rows) == (changed, count)


def test_a_share_is_told_with_its_op() -> None:
    found = Decisions(node="k", op="TopK", changed=44, count=4096, shape=(4096, 2))
    assert found.text == "1.07% of the 4,096 decisions of k (TopK) change"


def test_decisions_of_free_number_are_as_many_as_rows() -> None:
    """Three numbers of each box were said to be decisions: 8 x 3."""
    graph = from_text(
        "input %0 x fp32[4]\n"
        "node nms non_max_suppression onnx::NonMaxSuppression fp32 (%0) -> (%1 k int64[n,3])\n"
        "output %1\n"
    )
    boxes = np.arange(12).reshape(4, 3)
    calls = [(boxes, boxes), (boxes[:3], boxes)]
    found = _compared(graph.nodes[0], calls, _free_rows(graph, 1))
    assert (found.changed, found.count, found.shape) == (1, 8, (8,))


def test_places_of_maxima_are_decisions_where_they_are_read() -> None:
    text = """
    net (float[n, 1, 8, 8] x) => (float[n, 4, k, k2] y) {
      [filter] c = Conv <pads = [1, 1, 1, 1]> (x, w)
      [pool] p, i = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (c)
      [back] y = RESULT
    }"""
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.normal(size=(4, 1, 3, 3)).astype(np.float32), "w")
    data = {"x": rng.normal(size=(16, 1, 8, 8)).astype(np.float32)}
    ops: list[list[str]] = []
    for result in ("MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> (p, i)", "Relu(p)"):
        model = parse(text.replace("RESULT", result))
        model.graph.initializer.append(weight)
        done = finecast.convert(model, policy="all:fp16", engine="onnxruntime", data=data)
        assert done.verified is not None
        ops.append([one.node for one in done.verified.decisions])
    assert ops == [["pool"], []]
