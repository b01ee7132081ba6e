"""What TensorRT 11 documents about the ONNX models that it takes, checked on a model.

TensorRT's networks are strongly typed: a tensor's type is that of the graph, and no flag of
the builder changes it. Nothing of TensorRT is needed here. Each row of ``RULES`` has the place
where NVIDIA states the rule; what its builder refuses beyond these rules is not known here.

Law: a model is read and never changed; constants are read only if they are scales or zero
points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto, TensorProto, numpy_helper

_DOCS: Final = "docs.nvidia.com/deeplearning/tensorrt/latest/"
_OPERATORS: Final = "github.com/onnx/onnx-tensorrt, docs/operators.md"
_OPSETS: Final = f"{_DOCS}reference/onnx-opset-guide.html"
_STRONG: Final = f"{_DOCS}inference-library/precision-control.html, strongly typed networks"
_SCHEMES: Final = f"{_DOCS}inference-library/work-with-quantized-types.html"
_EXPLICIT: Final = f"{_DOCS}inference-library/quantized-types-explicit-quantization.html"
_QUANTIZE: Final = "NvInfer.h, IQuantizeLayer and IDequantizeLayer"
_PARSER: Final = "github.com/onnx/onnx-tensorrt, onnxOpImporters.cpp, Q and DQ nodes"

OPSETS: Final = range(9, 26)
_FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
_CODES: Final = frozenset(
    {
        TensorProto.INT8,
        TensorProto.FLOAT8E4M3FN,
        TensorProto.INT4,
        TensorProto.FLOAT4E2M1,
    }
)
_OTHERS: Final = frozenset({TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL})
_WEIGHTED: Final = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_MOVES: Final = frozenset(
    {
        "Expand", "Flatten", "Identity", "MaxPool", "Reshape", "Slice", "Squeeze",
        "Transpose", "Unsqueeze",
    }
)  # fmt: skip
# Conversions between types, control flow, and operands that are settings in fp32.
_OF_SEVERAL_TYPES: Final = frozenset(
    {
        "Cast", "CastLike", "DequantizeLinear", "If", "Loop", "NonMaxSuppression",
        "QuantizeLinear", "Resize", "Scan", "Upsample",
    }
)  # fmt: skip
_WITHOUT_BF16: Final = frozenset(
    {"DeformConv", "GridSample", "Mish", "NonMaxSuppression", "NonZero", "RoiAlign"}
)
_UNSUPPORTED: Final = frozenset(
    {
        "AffineGrid", "Bernoulli", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr",
        "BitwiseXor", "BlackmanWindow", "CenterCropPad", "Col2Im", "Compress",
        "ConcatFromSequence", "ConvInteger", "DFT", "Det", "DynamicQuantizeLinear",
        "HammingWindow", "HannWindow", "ImageDecoder", "MatMulInteger", "MaxRoiPool",
        "MaxUnpool", "MelWeightMatrix", "Multinomial", "NegativeLogLikelihoodLoss",
        "Optional", "OptionalGetElement", "OptionalHasElement", "QLinearConv",
        "QLinearMatMul", "RegexFullMatch", "STFT", "SequenceAt", "SequenceConstruct",
        "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength",
        "SequenceMap", "SoftmaxCrossEntropyLoss", "SplitToSequence", "StringConcat",
        "StringNormalizer", "StringSplit", "TfIdfVectorizer", "Unique",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that a node breaks, and how; without a node it is the whole model's."""

    node: str
    rule: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """Tensors of a model, by name: types, sizes, constants, makers and readers."""

    types: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    constants: Mapping[str, TensorProto]
    makers: Mapping[str, NodeProto]
    readers: Mapping[str, Sequence[NodeProto]]
    ports: frozenset[str]

    @classmethod
    def of(cls, model: onnx.ModelProto) -> _Graph:
        graph = model.graph
        constants = {t.name: t for t in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant":
                values = [a.t for a in node.attribute if a.name == "value"]
                constants |= dict(zip(node.output, values, strict=False))
        ports = (*graph.input, *graph.output)
        typed = {v.name: v.type.tensor_type for v in (*ports, *_inferred(model))}
        readers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                readers.setdefault(name, []).append(node)
        held = constants.items()
        return cls(
            types={n: t.elem_type for n, t in typed.items()}
            | {n: t.data_type for n, t in held},
            shapes={n: tuple(d.dim_value for d in t.shape.dim) for n, t in typed.items()}
            | {n: tuple(t.dims) for n, t in held},
            constants=constants,
            makers={name: node for node in graph.node for name in node.output},
            readers=readers,
            ports=frozenset(v.name for v in ports),
        )

    def type_of(self, name: str) -> int:
        """The type of a tensor; 0 if it is not known."""
        return self.types.get(name, TensorProto.UNDEFINED)

    def numbers(self, name: str) -> NDArray[np.generic] | None:
        """The numbers of a constant; None if the tensor is computed."""
        tensor = self.constants.get(name)
        return None if tensor is None else numpy_helper.to_array(tensor)

    def decodes(self, name: str) -> int:
        """The type of the codes that the tensor is decoded from; 0 if it is not.

        Its numbers may have been moved since: TensorRT moves the decoding behind such ops.
        """
        maker = self.makers.get(name)
        while maker is not None and maker.op_type in _MOVES:
            maker = self.makers.get(maker.input[0])
        decoded = maker is not None and maker.op_type == "DequantizeLinear"
        return self.type_of(maker.input[0]) if maker is not None and decoded else 0


# Larger constants are not needed to find types and sizes.
_SMALL: Final = 1 << 10


def _inferred(model: onnx.ModelProto) -> Sequence[onnx.ValueInfoProto]:
    """Types of all tensors, found without the numbers of large constants."""
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    graph = light.graph
    graph.name = model.graph.name
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    graph.value_info.extend(model.graph.value_info)
    for tensor in model.graph.initializer:
        if int(np.prod(tensor.dims, dtype=np.int64)) <= _SMALL:
            graph.initializer.append(tensor)
        else:
            made = onnx.helper.make_tensor_value_info(
                tensor.name, tensor.data_type, tensor.dims
            )
            graph.input.append(made)
    return onnx.shape_inference.infer_shapes(light).graph.value_info


def _operator(node: NodeProto, graph: _Graph) -> Iterator[str]:
    del graph
    if node.domain not in ("", "ai.onnx"):
        yield f"{node.domain}::{node.op_type} needs a plugin"
    elif node.op_type in _UNSUPPORTED:
        yield f"the parser has no {node.op_type}"


def _types(node: NodeProto, graph: _Graph) -> Iterator[str]:
    for name in node.output:
        kind = graph.type_of(name)
        if kind == TensorProto.UINT8 and name not in graph.ports:
            yield f"{name} is uint8, which inputs and outputs alone may be"
        elif kind not in _FLOATS | _CODES | _OTHERS | {0, TensorProto.UINT8}:
            yield f"{name} is {_named(kind)}"
    touched = {graph.type_of(name) for name in (*node.input, *node.output)}
    if node.op_type in _WITHOUT_BF16 and TensorProto.BFLOAT16 in touched:
        yield f"{node.op_type} has no bfloat16"


def _equal(node: NodeProto, graph: _Graph) -> Iterator[str]:
    if node.op_type in _OF_SEVERAL_TYPES:
        return
    floats = {kind for name in node.input if (kind := graph.type_of(name)) in _FLOATS}
    if len(floats) > 1:
        yield f"its operands are {' and '.join(sorted(map(_named, floats)))}"


def _quantized(node: NodeProto, graph: _Graph) -> Iterator[str]:
    """Codes are made by QuantizeLinear or are constants; DequantizeLinear alone reads them."""
    for name in node.output:
        if graph.type_of(name) in _CODES and node.op_type not in (
            "QuantizeLinear",
            "Constant",
        ):
            yield f"{node.op_type} gives {_named(graph.type_of(name))}"
    zero_points = node.op_type in ("QuantizeLinear", "DequantizeLinear")
    for index, name in enumerate(node.input):
        allowed = zero_points and (index == 2 or node.op_type == "DequantizeLinear")
        if graph.type_of(name) in _CODES and not allowed:
            yield f"{node.op_type} reads {name}, which is {_named(graph.type_of(name))}"


def _zero_points(node: NodeProto, graph: _Graph) -> Iterator[str]:
    if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
        return
    codes = node.output[0] if node.op_type == "QuantizeLinear" else node.input[0]
    if graph.type_of(codes) not in _CODES:
        kind = _named(graph.type_of(codes))
        yield f"it quantizes to {kind}, not int8, float8e4m3fn, int4 or float4e2m1"
    if len(node.input) > 2 and node.input[2]:
        zeros = graph.numbers(node.input[2])
        if zeros is None or np.any(zeros.astype(np.float32) != 0):
            yield "its zero point is not the constant 0"


def _scales(node: NodeProto, graph: _Graph) -> Iterator[str]:
    if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
        return
    name, data = node.input[1], node.input[0]
    scales = graph.numbers(name)
    if scales is None:
        if graph.decodes(name) == 0:  # a scale of scales, as NVFP4 has
            yield f"its scale {name} is no constant"
        return
    numbers = scales.astype(np.float32)
    if not numbers.size or not (np.isfinite(numbers) & (numbers > 0)).all():
        yield "its scales are not all positive"
    plain = graph.type_of(data if node.op_type == "QuantizeLinear" else node.output[0])
    if plain and graph.type_of(name) != plain:
        yield f"its scale is {_named(graph.type_of(name))} beside {_named(plain)}"
    if numbers.size == 1:
        return
    if node.op_type == "QuantizeLinear" and data not in graph.constants:
        yield f"{data} is computed, and has {numbers.size} scales in place of one"
    shape = graph.shapes.get(data, ())
    axis = _integer(node, "axis", 1)
    if numbers.ndim == 1 and shape and shape[axis] != numbers.size:
        yield f"{numbers.size} scales for {shape[axis]} channels along axis {axis}"


def _operands(node: NodeProto, graph: _Graph) -> Iterator[str]:
    """Kernels on codes read both operands as codes; only int4 and fp4 are of weights alone."""
    if node.op_type not in _WEIGHTED or len(node.input) < 2:
        return
    value, weights = (graph.decodes(name) for name in node.input[:2])
    alone = (0, TensorProto.INT4, TensorProto.FLOAT4E2M1)
    if value != weights and (value or weights not in alone):
        kinds = [_named(kind) if kind else "floats" for kind in (value, weights)]
        yield f"it multiplies {kinds[0]} by {kinds[1]}"


def _named(kind: int) -> str:
    return TensorProto.DataType.Name(kind).lower() if kind else "of an unknown type"


def _integer(node: NodeProto, name: str, default: int) -> int:
    found = [a.i for a in node.attribute if a.name == name and a.type == AttributeProto.INT]
    return found[0] if found else default


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRule:
    """A rule of TensorRT's: what it says, and where that is documented."""

    name: str
    says: str
    source: str
    judge: Callable[[NodeProto, _Graph], Iterator[str]]


RULES: Final = (
    TypeRule(
        name="operator",
        says="An op is of ONNX's own domain and among those that the parser has.",
        source=_OPERATORS,
        judge=_operator,
    ),
    TypeRule(
        name="types",
        says="Tensors are fp32, fp16, bf16, int32, int64 or bool, or quantized; uint8 is for"
        " inputs and outputs of the network. Some ops have no bf16.",
        source=_OPERATORS,
        judge=_types,
    ),
    TypeRule(
        name="equal types",
        says="All float operands of an op have one type: casts are nodes.",
        source=_STRONG,
        judge=_equal,
    ),
    TypeRule(
        name="quantized",
        says="Types of 8 and 4 bits exist between a quantizing and a dequantizing node"
        " alone: no cast gives them, and no other op reads them.",
        source=f"{_OPERATORS}; {_EXPLICIT}",
        judge=_quantized,
    ),
    TypeRule(
        name="zero point",
        says="Quantized types are int8, fp8 (e4m3), int4 and fp4 (e2m1); zero points are 0.",
        source=f"{_SCHEMES}; {_PARSER}",
        judge=_zero_points,
    ),
    TypeRule(
        name="scale",
        says="Scales are positive constants of the type of what is quantized: one for a"
        " value, one for each channel along the axis for weights.",
        source=f"{_QUANTIZE}; {_PARSER}",
        judge=_scales,
    ),
    TypeRule(
        name="operands",
        says="Of a product both operands are quantized, to one type, or none; weights alone"
        " are in int4 or fp4.",
        source=f"{_EXPLICIT}; {_SCHEMES}",
        judge=_operands,
    ),
)


def violations(model: onnx.ModelProto) -> list[Violation]:
    """The rules that a model breaks, node by node. Bodies of control flow are not read."""
    opset = max(
        (o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0
    )
    broken: list[Violation] = []
    if opset not in OPSETS:
        text = f"opset {opset} is not among {OPSETS.start} to {OPSETS.stop - 1}: {_OPSETS}"
        broken.append(Violation(node="", rule="opset", text=text))
    graph = _Graph.of(model)
    broken += [
        Violation(node=node.name, rule=rule.name, text=f"{text} ({rule.source})")
        for node in model.graph.node
        for rule in RULES
        for text in rule.judge(node, graph)
    ]
    return broken
