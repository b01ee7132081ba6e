"""Counts what OpenVINO and ONNX Runtime fuse in each format; writes docs/fusions.md.

    python scripts/fusions.py

Each pattern stands between two products or convolutions, in a model of random weights. Kernels
that compute are counted; those that only move numbers, and constants, are not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnxruntime
import openvino

import finecast
from finecast.measure.environment import environment
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy, Scope

PAGE: Final = Path(__file__).parents[1] / "docs" / "fusions.md"
_MOVES: Final = frozenset(
    {"Broadcast", "Const", "Convert", "Input", "Output", "Reorder", "Reshape", "ShapeOf"}
    | {"Squeeze", "Transpose", "Unsqueeze", "Cast", "ReorderInput", "ReorderOutput"}
)
# What rounds the input ``x`` before its cast, in ONNX models and in IR.
_ROUNDED: Final = tuple(
    f"{cast}_{step}"
    for cast in ("x", "x/cast_bf16")
    for step in ("scaled", "part", "whole", "rounded")
)
_OUTER_CASTS: Final = 2  # that of the model's input and that of its output
_WIDTH: Final = 32
_CONV: Final = "c = Conv<pads = [1, 1, 1, 1]>(x, w4, b)"
_MATMUL: Final = "p = MatMul(x, w2) c = Add(p, b)"
_ROOT: Final = "q = Pow(c, two) m = ReduceMean(q, axis) e = Add(m, tiny) r = Sqrt(e)"
_CENTRED: Final = (
    "a = ReduceMean(c, axis) d = Sub(c, a) q = Pow(d, two) m = ReduceMean(q, axis)"
    " e = Add(m, tiny) r = Sqrt(e)"
)
_TANH: Final = "k = Mul(f, root2pi) t = Tanh(k) u = Add(t, one) h = Mul(c, half) y = Mul(h, u)"
_ATTENTION: Final = "o = MatMul(s, v) y = Transpose<perm = [0, 2, 1, 3]>(o)"
_SPLIT: Final = (
    "i = Reshape(c, heads) v = Transpose<perm = [0, 2, 1, 3]>(i)"
    " k = Transpose<perm = [0, 2, 3, 1]>(i)"
)

# By name: the ops before the pattern, which give c, and the pattern, from c to y.
PATTERNS: Final[Mapping[str, tuple[str, str]]] = {
    "Conv, Relu": (_CONV, "y = Relu(c)"),
    "Conv, BatchNormalization": (_CONV, "y = BatchNormalization(c, s1, b, b, s1)"),
    "Conv, x * Sigmoid(x)": (_CONV, "s = Sigmoid(c) y = Mul(c, s)"),
    "Conv, x * Sigmoid(1 * x)": (_CONV, "d = Mul(c, one) s = Sigmoid(d) y = Mul(c, s)"),
    "Conv, x * Sigmoid(1.7 * x)": (_CONV, "d = Mul(c, factor) s = Sigmoid(d) y = Mul(c, s)"),
    "Conv, HardSwish": (_CONV, "y = HardSwish(c)"),
    "Conv, x * HardSigmoid(x)": (
        _CONV,
        "s = HardSigmoid<alpha = 0.16666667, beta = 0.5>(c) y = Mul(c, s)",
    ),
    "Conv, x * Tanh(Softplus(x))": (_CONV, "s = Softplus(c) t = Tanh(s) y = Mul(c, t)"),
    "MatMul, Gelu": (_MATMUL, "y = Gelu(c)"),
    "MatMul, Gelu written with Erf": (
        _MATMUL,
        "d = Div(c, root2) e = Erf(d) f = Add(e, one) g = Mul(c, f) y = Mul(g, half)",
    ),
    "MatMul, Gelu written with Tanh": (
        _MATMUL,
        f"d = Pow(c, three) e = Mul(d, cubic) f = Add(c, e) {_TANH}",
    ),
    "MatMul, x * Sigmoid(1.7 * x)": (
        _MATMUL,
        "d = Mul(c, factor) s = Sigmoid(d) y = Mul(c, s)",
    ),
    "LayerNormalization": (_MATMUL, "y = LayerNormalization(c, s1, b)"),
    "LayerNormalization written with Div": (
        _MATMUL,
        f"{_CENTRED} n = Div(d, r) g = Mul(n, s1) y = Add(g, b)",
    ),
    "LayerNormalization written with Reciprocal": (
        _MATMUL,
        f"{_CENTRED} i = Reciprocal(r) n = Mul(d, i) g = Mul(n, s1) y = Add(g, b)",
    ),
    "RMSNormalization": (_MATMUL, "y = RMSNormalization(c, s1)"),
    "RMSNormalization written with Div": (_MATMUL, f"{_ROOT} n = Div(c, r) y = Mul(n, s1)"),
    "RMSNormalization written with Reciprocal": (
        _MATMUL,
        f"{_ROOT} i = Reciprocal(r) n = Mul(c, i) y = Mul(n, s1)",
    ),
    "RMSNormalization written with 1 / Sqrt": (
        _MATMUL,
        f"{_ROOT} i = Div(one, r) n = Mul(c, i) y = Mul(n, s1)",
    ),
    "attention, q scaled": (
        _MATMUL,
        f"{_SPLIT} n = Mul(v, half) t = MatMul(n, k) s = Softmax(t) {_ATTENTION}",
    ),
    "attention, product divided": (
        _MATMUL,
        f"{_SPLIT} n = MatMul(v, k) t = Div(n, root2) s = Softmax(t) {_ATTENTION}",
    ),
}


_COLUMNS: Final = (
    "pattern",
    "OpenVINO fp32",
    "hint bf16",
    "bf16, kept",
    "bf16, restated",
    "IR in bf16",
    "fp16",
    "ONNX Runtime fp32",
    "fp16",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Kernels by engine and format."""

    openvino: tuple[int, int, int, int, int, int]
    onnxruntime: tuple[int, int]


def main() -> None:
    """Count and write the page."""
    rows = {name: _counts(*parts) for name, parts in PATTERNS.items()}
    engines = f"openvino {version('openvino')}, onnxruntime {version('onnxruntime')}"
    lines = [
        "# What engines fuse",
        "",
        "Kernels that compute each pattern, with what is before and after it. What moves is",
        "left out, and so are the casts of the model's input and output, and what rounds the",
        "input before its cast. Written by `python scripts/fusions.py`.",
        "",
        "- **Hint**: the fp32 model under OpenVINO's own precision hint.",
        "- **Kept**: types alone are changed (`--keep-ops`).",
        "- **Restated**: as finecast writes it.",
        "- **IR**: as OpenVINO's converter makes it of the fp32 model, converted by finecast.",
        "- ONNX Runtime has no bf16 kernels on CPUs.",
        "",
        f"{environment().cpu}; {engines}.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|{' --- |' * len(_COLUMNS)}",
    ]
    lines += [
        f"| {name} | {' | '.join(map(str, (*row.openvino, *row.onnxruntime)))} |"
        for name, row in rows.items()
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _counts(before: str, body: str) -> Counts:
    model = _model(before, body)
    kept = _converted(model, Format.BF16, keep_ops=True)
    restated, fp16 = (_converted(model, f) for f in (Format.BF16, Format.FP16))
    return Counts(
        openvino=(
            _openvino(model, "f32"),
            _openvino(model, "bf16"),
            _openvino(kept, "f32"),
            _openvino(restated, "f32"),
            _kernels(_low_ir(model), "f32"),
            _openvino(fp16, "f32"),
        ),
        onnxruntime=(_onnxruntime(model), _onnxruntime(fp16)),
    )


def _model(before: str, body: str) -> onnx.ModelProto:
    random = np.random.default_rng(0)
    image = before is _CONV
    shape = f"n, {_WIDTH}, 16, 16" if image else f"n, 64, {_WIDTH}"
    after = "z = Conv<pads = [1, 1, 1, 1]>(y, v4)" if image else "z = MatMul(o2, v2)"
    join = "" if image else "o2 = Reshape(y, joined)"
    ranks = "a, b, c, d" if image else "a, b, c"
    text = f"g (float[{shape}] x) => (float[{ranks}] z) {{ {before} {body} {join} {after} }}"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]> {text}')
    arrays = {
        **{n: random.standard_normal((_WIDTH, _WIDTH, 3, 3)) / 16 for n in ("w4", "v4")},
        **{n: random.standard_normal((_WIDTH, _WIDTH)) / 6 for n in ("w2", "v2")},
        "b": random.standard_normal(_WIDTH) / 4,
        "s1": random.uniform(0.5, 1.5, _WIDTH),
    }
    scalars = {
        "one": 1,
        "two": 2,
        "three": 3,
        "half": 0.5,
        "factor": 1.702,
        "tiny": 1e-5,
        "root2": 2**0.5,
        "root2pi": (2 / np.pi) ** 0.5,
        "cubic": 0.044715,
    }
    sizes = {"axis": [-1], "heads": [0, 0, 4, _WIDTH // 4], "joined": [0, 64, _WIDTH]}
    given = {n: np.asarray(a, np.float32) for n, a in (arrays | scalars).items()}
    given |= {n: np.asarray(a, np.int64) for n, a in sizes.items()}
    read = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(a, n) for n, a in given.items() if n in read
    )
    return proto


def _converted(
    model: onnx.ModelProto, low: Format, *, keep_ops: bool = False
) -> onnx.ModelProto:
    policy = Policy(scope=Scope.ALL, formats=(low,), keep_ops=keep_ops)
    done = finecast.convert(model, policy=policy, engine="openvino", verify=False)
    assert done.model is not None
    return done.model


def _low_ir(model: onnx.ModelProto) -> openvino.Model:
    given = openvino.convert_model(BytesIO(model.SerializeToString()))
    policy = Policy(scope=Scope.ALL, formats=(Format.BF16,))
    low: openvino.Model = finecast.convert(given, policy=policy, verify=False).model
    return low


def _openvino(model: onnx.ModelProto, hint: str) -> int:
    return _kernels(openvino.Core().read_model(model.SerializeToString()), hint)


def _kernels(model: openvino.Model, hint: str) -> int:
    core = openvino.Core()
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": hint})
    kernels = compiled.get_runtime_model().get_ordered_ops()
    infos = [k.get_rt_info() for k in kernels if not k.get_friendly_name().endswith(_ROUNDED)]
    kinds = [str(info["layerType"].astype(str)) for info in infos]
    casts = max(0, kinds.count("Convert") - _OUTER_CASTS)
    return casts + sum(kind not in _MOVES for kind in kinds)


def _onnxruntime(model: onnx.ModelProto) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(path)
        options.log_severity_level = 4
        onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        nodes = onnx.load(path).graph.node
    return sum(node.op_type not in _MOVES for node in nodes)


if __name__ == "__main__":
    main()
