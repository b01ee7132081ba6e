"""IR whose weights stand behind ops on constants."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openvino import Core, Model, opset13, opset16, save_model

import finecast
from finecast.frontends import openvino as frontend
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy

N = 256
_EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, N)).astype(np.float32)
W = (RNG.standard_normal((N, N)) / 16).astype(np.float32)


def _weights(kind: str) -> Any:
    match kind:
        case "plain":
            return opset13.constant(W)
        case "transpose":
            return opset13.transpose(opset13.constant(np.ascontiguousarray(W.T)), [1, 0])
        case "convert":
            return opset13.convert(opset13.constant(W.astype(np.float16)), "f32")
        case "convert and transpose":
            low = opset13.constant(np.ascontiguousarray(W.T).astype(np.float16))
            return opset13.transpose(opset13.convert(low, "f32"), [1, 0])
        case "split":
            both = opset13.constant(np.concatenate([W + 1, W], axis=0))
            return opset13.split(both, 0, 2).output(1)
        case "norm":
            weights = opset13.constant(W)
            length = opset13.reduce_l2(weights, opset13.constant([0]), keep_dims=True)
            return opset13.divide(weights, length)
        case _:
            raise ValueError(kind)


def _saved(kind: str, folder: Path) -> Path:
    return _saved_behind(_weights(kind), folder, kind)


def _saved_behind(weights: Any, folder: Path, kind: str = "behind") -> Path:
    x = opset13.parameter([-1, N], np.float32, name="x")
    product = opset13.matmul(x, weights, False, False, name="product")
    end = opset13.relu(product, name="end")
    path = folder / f"{kind.replace(' ', '_')}.xml"
    results: Any = [opset13.result(end, name="y")]
    model: Any = Model  # its stub does not bind this constructor
    save_model(model(results, [x], kind), path, compress_to_fp16=False)
    return path


def _outputs(path: Path) -> Any:
    return Core().compile_model(path, "CPU", _EXACT)(X)[0]


KINDS = ("transpose", "convert", "convert and transpose", "split", "norm")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_from_constants_is_a_constant(kind: str, tmp_path: Path) -> None:
    source = _saved(kind, tmp_path)
    graph = frontend.prepare(frontend.load(source), Policy.parse("all:bf16")).graph
    assert [node.name for node in graph.nodes] == ["product", "end"]
    weights = graph.read(graph.find("product"), 1)
    assert weights is not None
    assert weights.constant is not None
    exact = np.maximum(X @ weights.constant.read().astype(np.float32), 0)
    assert np.allclose(_outputs(source), exact, atol=1e-4)


@pytest.mark.parametrize("policy", ["all:int8_weights", "all:bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_converted_as_a_plain_weight_is(kind: str, policy: str, tmp_path: Path) -> None:
    source, target = _saved(kind, tmp_path), tmp_path / "low.xml"
    finecast.convert(source, target, policy=policy, data={"x": X}, engine="openvino")
    plain = _saved("plain", tmp_path)
    size = target.with_suffix(".bin").stat().st_size
    assert size < 0.6 * plain.with_suffix(".bin").stat().st_size  # the weight is in it once
    exact, low = _outputs(source), _outputs(target)
    assert 0 < np.linalg.norm(low - exact) < 0.03 * np.linalg.norm(exact)


def test_what_no_edit_touches_stays_as_it_was(tmp_path: Path) -> None:
    source, target = _saved("convert and transpose", tmp_path), tmp_path / "low.xml"
    finecast.convert(
        source,
        target,
        policy=Policy(formats=(Format.FP16,), scope="all", exclude=(re.compile("product"),)),
    )
    kinds = [op.get_type_name() for op in Core().read_model(target).get_ordered_ops()]
    assert "Transpose" in kinds
    assert source.with_suffix(".bin").read_bytes() == target.with_suffix(".bin").read_bytes()


def _behind(kind: str) -> Any:
    """Ops on constants of which OpenVINO evaluates the first four kinds in kernels alone."""
    twice = opset13.constant(np.concatenate([W, W + 1]))
    match kind:
        case "identity behind an op":
            turned = opset13.transpose(opset13.constant(np.ascontiguousarray(W.T)), [1, 0])
            return opset16.identity(turned)
        case "elu":
            return opset13.elu(opset13.constant(W), 1.0)
        case "roll":
            return opset13.roll(opset13.constant(W), _ints(3), _ints(0))
        case "gather by tuples":
            return opset13.gather_nd(opset13.constant(W[None]), _ints([0]))
        case "slice":
            return opset13.slice(twice, _ints([0]), _ints([N]), _ints([1]), _ints([0]))
        case "slice from onnx":  # whose steps have the shape of its starts
            starts = _ints([0])
            steps = opset13.broadcast(_ints(1), opset13.shape_of(starts))
            return opset13.slice(twice, starts, _ints([N]), steps, _ints([0]))
        case _:
            raise ValueError(kind)


def _ints(numbers: Any) -> Any:
    return opset13.constant(np.array(numbers, np.int64))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("identity behind an op", W),
        ("elu", np.where(W > 0, W, np.expm1(W))),
        ("roll", np.roll(W, 3, axis=0)),
        ("gather by tuples", W),
        ("slice", W),
        ("slice from onnx", W),
    ],
)
def test_numbers_of_ops_that_openvino_evaluates_in_kernels_alone_or_shapes(
    kind: str, wanted: Any, tmp_path: Path
) -> None:
    source = _saved_behind(_behind(kind), tmp_path)
    graph = frontend.prepare(frontend.load(source), Policy.parse("all:bf16")).graph
    assert [node.name for node in graph.float_nodes] == ["product", "end"]
    weights = graph.read(graph.find("product"), 1)
    assert weights is not None
    assert weights.constant is not None
    assert np.allclose(weights.constant.read(), wanted, rtol=1e-6, atol=1e-7)


def test_weights_behind_identity_are_quantized(tmp_path: Path) -> None:
    source = _saved_behind(_behind("identity behind an op"), tmp_path)
    target = tmp_path / "low.xml"
    done = finecast.convert(
        source, target, policy="all:int8_weights", data={"x": X}, engine="openvino"
    )
    assert Format.INT8_WEIGHTS in done.plan.formats.values()
    exact, low = _outputs(source), _outputs(target)
    assert 0 < np.linalg.norm(low - exact) < 0.03 * np.linalg.norm(exact)


def test_a_large_constant_of_few_bytes_stays_an_op(tmp_path: Path) -> None:
    """Its numbers would take far more memory than the model."""
    rows = opset13.broadcast(opset13.constant(np.float32(0.5)), _ints([N, 1 << 20]))
    file = frontend.load(_saved_behind(rows, tmp_path))
    graph = frontend.prepare(file, Policy.parse("all:bf16")).graph
    weights = graph.read(graph.find("product"), 1)
    assert weights is not None
    assert weights.constant is None


@pytest.mark.parametrize("fmt", ["int8_weights", "int4_weights", "bf16", "fp16"])
def test_a_tied_table_is_stored_once(fmt: str, tmp_path: Path) -> None:
    """A lookup reads it as it is, a product transposed: the file had it twice."""
    ids = opset13.parameter([8], np.int64, name="ids")
    table = opset13.constant(np.vstack([W, W[::-1]]))
    rows = opset13.gather(table, ids, opset13.constant(0), name="rows")
    turned = opset13.transpose(table, opset13.constant([1, 0]))
    product = opset13.matmul(rows, turned, False, False, name="product")
    model: Any = Model
    results: Any = [opset13.result(product, name="y")]
    path, low = tmp_path / "tied.xml", tmp_path / "low.xml"
    save_model(model(results, [ids], "tied"), path, compress_to_fp16=False)
    done = finecast.convert(path, low, f"all:{fmt}", engine="openvino", progress=False)
    assert done.counts == {fmt: 2}
    bits = Format.parse(fmt).bits
    size = low.with_suffix(".bin").stat().st_size
    assert size < 1.3 * 2 * N * N * bits / 8 + 4 * 2 * N * 4
    assert done.verified.relative_error is not None
    assert done.verified.relative_error < 0.3
