"""One model per thread of peers.md's "Overflow and silent errors"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from finecast.data.metrics import METRICS
from finecast.frontends import onnx as frontend
from finecast.numbers.formats import Format
from finecast.planning.planner import lowest
from finecast.rules import Context, permit
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy
from tests.frontends.tools import agree, convert, formats, model, run, tensor

# ONNX Runtime's own kernels overflow on purpose here.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(
        op, inputs.split(), outputs.split(), name=outputs.split()[0], **attributes
    )


def kept_by_facts(proto: onnx.ModelProto, folder: Path, **feeds: np.ndarray) -> dict[str, str]:
    """Formats by node name, after every value was observed on ``feeds``."""
    onnx.save(proto, folder / "m.onnx")
    file = frontend.load(folder / "m.onnx")
    policy = Policy.parse("all:fp16")
    prepared = frontend.prepare(file, policy)
    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    names = [o for n in proto.graph.node for o in n.output]
    del shown.graph.output[:]
    shown.graph.output.extend(helper.make_tensor_value_info(n, 1, None) for n in names)
    arrays = dict(zip(names, run(shown, **feeds), strict=True)) | feeds
    facts = {
        v.id: ValueFacts.of(arrays[v.name]) for v in prepared.graph.values if v.name in arrays
    }
    permissions = permit(Context(graph=prepared.graph, policy=policy, facts=facts))
    chosen = lowest(prepared.graph, permissions, Format.FP16)
    return {prepared.graph.nodes[i].name: f.label for i, f in chosen.items()}


def layer_norm() -> onnx.ModelProto:
    """Written out, as exporters before opset 17 did."""
    return model(
        [
            node("ReduceMean", "x", "mean", axes=[-1]),
            node("Sub", "x mean", "centred"),
            node("Pow", "centred two", "squares"),
            node("ReduceMean", "squares", "variance", axes=[-1]),
            node("Add", "variance epsilon", "safe"),
            node("Sqrt", "safe", "deviation"),
            node("Div", "centred deviation", "y"),
        ],
        {"x": [2, 64]},
        {"y": [2, 64]},
        [tensor("two", 2.0), tensor("epsilon", 1e-5)],
    )


def test_trt_2564_and_4493_layer_norm_whose_squares_overflow(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32) * 1000
    kept = kept_by_facts(layer_norm(), tmp_path, x=x)
    assert kept["squares"] == "fp32"
    assert kept["variance"] == "fp32"
    assert kept["deviation"] == "fp32"  # reads the variance
    assert kept["y"] == "fp32"  # the epsilon, which fp16 has no normal number for, guards it
    assert kept["centred"] == "fp16"


def test_ort_31626_an_inf_that_is_absorbed_is_seen_where_it_arises(tmp_path: Path) -> None:
    """1 / Inf is 0: the output would be finite and wrong."""
    proto = model(
        [
            node("Mul", "x x", "square"),
            node("Reciprocal", "square", "r"),
            node("Add", "r x", "y"),
        ],
        {"x": [4]},
        {"y": [4]},
    )
    x = np.array([1000, 300, 1, 2], np.float32)
    kept = kept_by_facts(proto, tmp_path, x=x)
    assert kept["square"] == "fp32"
    assert kept["r"] == "fp32"
    assert kept["y"] == "fp16"


@pytest.mark.parametrize("thread", ["ort_26732_gemma", "ov_36504_rms_norm"])
def test_activations_of_which_a_few_are_huge(tmp_path: Path, thread: str) -> None:
    proto = model(
        [
            node("Mul", "x scale", "h"),
            node("Mul", "h h", "hh"),
            node("ReduceMean", "hh", "m", axes=[-1]),
            node("Sqrt", "m", "s"),
            node("Div", "h s", "y"),
        ],
        {"x": [1, 32]},
        {"y": [1, 32]},
        [tensor("scale", 50.0)],
    )
    x = np.ones((1, 32), np.float32)
    x[0, 3] = 1000
    kept = kept_by_facts(proto, tmp_path, x=x)
    assert kept["hh"] == "fp32", thread
    assert kept["m"] == "fp32", thread


@pytest.mark.parametrize("policy", ["auto:fp16", "auto:bf16"])
def test_oc_323_reduce_mean_of_a_large_tensor(tmp_path: Path, policy: str) -> None:
    """65,536 terms: n times unit roundoff is above 1 in fp16 and in bf16."""
    proto = model([node("ReduceMean", "x", "y", axes=[1])], {"x": [1, 65536]}, {"y": [1, 1]})
    _, plan, _ = convert(proto, tmp_path, policy)
    assert formats(plan)["y"] == "fp32"


def test_all_fp16_reduce_mean_of_a_large_tensor_is_kept_too(tmp_path: Path) -> None:
    proto = model([node("ReduceMean", "x", "y", axes=[1])], {"x": [1, 65536]}, {"y": [1, 1]})
    after, plan, _ = convert(proto, tmp_path, "all:fp16")
    x = np.full((1, 65536), 3.0, np.float32)
    assert run(after, x=x)[0] == pytest.approx(3.0)
    assert formats(plan)["y"] == "fp32"


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("policy", ["all:fp16", "all:bf16"])
def test_oc_249_and_ort_21345_nan_and_inf_of_the_model_stay(
    tmp_path: Path, number: float, policy: str
) -> None:
    proto = model(
        [node("Add", "x k", "y")], {"x": [3]}, {"y": [3]}, [tensor("k", [number, 1.0, 2.0])]
    )
    after, _, _ = convert(proto, tmp_path, policy)
    stored = next(t for t in after.graph.initializer)
    array = onnx.numpy_helper.to_array(stored).astype(np.float32)
    assert np.array_equal(array, np.array([number, 1, 2], np.float32), equal_nan=True)
    if policy == "all:fp16":
        agree(proto, after, Format.FP16)


def attention(mask: float, *, how: str) -> onnx.ModelProto:
    apply = {
        "where": [node("Where", "keep scores mask", "masked")],
        "add": [
            node("Cast", "keep", "k", to=1),
            node("Sub", "one k", "hidden"),
            node("Mul", "hidden mask", "bias"),
            node("Add", "scores bias", "masked"),
        ],
    }[how]
    proto = model(
        [
            node("MatMul", "q kt", "scores"),
            *apply,
            node("Softmax", "masked", "p"),
            node("MatMul", "p v", "y"),
        ],
        {"q": [4, 8]},
        {"y": [4, 8]},
        [
            tensor("kt", np.random.default_rng(1).standard_normal((8, 4))),
            tensor("v", np.random.default_rng(2).standard_normal((4, 8))),
            tensor("mask", mask),
            tensor("one", 1.0),
        ],
    )
    proto.graph.input.append(helper.make_tensor_value_info("keep", 9, [4, 4]))
    return proto


@pytest.mark.parametrize("how", ["where", "add"])
@pytest.mark.parametrize("mask", [-3.4028234663852886e38, -1e9, -65504.0])
@pytest.mark.parametrize("policy", ["all:fp16", "all:bf16"])
def test_coremltools_2669_a_finite_mask_stays_finite(
    tmp_path: Path, how: str, mask: float, policy: str
) -> None:
    """Row 0 is masked as a whole: fp32 gives equal shares, -Inf would give NaN."""
    before = attention(mask, how=how)
    after, plan, _ = convert(before, tmp_path, policy)
    keep = np.tril(np.ones((4, 4), bool))
    keep[0] = False
    assert formats(plan)["scores"] == policy[4:]
    stored = {
        t.name.partition("_")[0]: onnx.numpy_helper.to_array(t)
        for t in after.graph.initializer
    }
    assert np.isfinite(stored["mask"].astype(np.float32)).all()
    if policy == "all:fp16":
        agree(before, after, Format.FP16, keep=keep)


@pytest.mark.parametrize("how", ["where"])
@pytest.mark.parametrize("policy", ["all:fp16", "all:bf16"])
def test_trt_4175_an_infinite_mask_is_not_clamped(
    tmp_path: Path, how: str, policy: str
) -> None:
    before = attention(-np.inf, how=how)
    after, plan, _ = convert(before, tmp_path, policy)
    assert set(formats(plan).values()) == {policy[4:]}
    stored = {
        t.name.partition("_")[0]: onnx.numpy_helper.to_array(t)
        for t in after.graph.initializer
    }
    assert np.isneginf(stored["mask"].astype(np.float32))
    if policy == "all:fp16":
        agree(before, after, Format.FP16, keep=np.tril(np.ones((4, 4), bool)))


@pytest.mark.parametrize("small", [-1e-12, 1e-12, -3e-8, 1e-30])
def test_small_constants_keep_their_sign_or_their_op(tmp_path: Path, small: float) -> None:
    """ModelOpt made +6e-8 of small negative constants."""
    proto = model(
        [node("Add", "x k", "h"), node("Mul", "h h", "y")],
        {"x": [4]},
        {"y": [4]},
        [tensor("k", small)],
    )
    after, plan, _ = convert(proto, tmp_path, "all:fp16")
    assert formats(plan)["h"] == "fp32"
    assert onnx.numpy_helper.to_array(after.graph.initializer[0]) == np.float32(small)


def test_a_few_tiny_weights_among_many_round_to_zero_with_their_sign(tmp_path: Path) -> None:
    weights = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    weights[0, :4] = [-1e-9, 1e-9, -0.0, 0.0]
    proto = model(
        [node("MatMul", "x w", "y")], {"x": [2, 8]}, {"y": [2, 8]}, [tensor("w", weights)]
    )
    after, plan, _ = convert(proto, tmp_path, "all:fp16")
    assert formats(plan)["y"] == "fp16"
    array = onnx.numpy_helper.to_array(after.graph.initializer[0])
    assert np.array_equal(np.signbit(array), np.signbit(weights))
    assert not array[0, :4].any()


def test_a_divisor_that_underflows_to_zero(tmp_path: Path) -> None:
    proto = model(
        [node("Mul", "x k", "d"), node("Div", "x d", "y")],
        {"x": [4]},
        {"y": [4]},
        [tensor("k", 1e-3)],
    )
    x = np.full(4, 1e-5, np.float32)
    kept = kept_by_facts(proto, tmp_path, x=x)
    assert kept["d"] == "fp32"
    assert kept["y"] == "fp32"


def test_one_element_of_a_divisor_that_underflows_is_too_many(tmp_path: Path) -> None:
    proto = model(
        [node("Mul", "x k", "d"), node("Identity", "d", "i"), node("Div", "x i", "y")],
        {"x": [1000]},
        {"y": [1000]},
        [tensor("k", 1e-2)],
    )
    x = np.ones(1000, np.float32)
    x[7] = 1e-6
    kept = kept_by_facts(proto, tmp_path, x=x)
    assert set(kept.values()) == {"fp32"}


@pytest.mark.parametrize("metric", [m for m in METRICS if METRICS[m].needs_reference])
def test_ort_14235_the_fp32_model_meets_its_own_baseline(metric: str) -> None:
    """Its outputs hold -Inf, and its own outputs are still the ideal."""
    proto = model(
        [node("Relu", "x", "r"), node("Log", "r", "y")], {"x": [4, 8]}, {"y": [4, 8]}
    )
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    first, second = run(proto, x=x)[0], run(proto, x=x)[0]
    assert np.isinf(first).any()
    score = METRICS[metric].start()
    score.update({"y": second}, None, {"y": first})
    assert score.result() == METRICS[metric].ideal
