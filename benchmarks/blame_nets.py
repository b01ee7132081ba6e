"""Five nets, and faults that are planted in them: what ``bench_blame`` looks for.

Each fault comes as an fp32 model, the low model of it, and the names of the ops at fault. In
fp32 the planted ops change nothing, or nothing that matters; the fault shows in low types.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from benchmarks.common import shared_case

Feeds = dict[str, NDArray[Any]]
_OPSET: Final = 17
_MOST_FP16: Final = 65504.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """A net in fp32, and samples of its inputs.

    ``outliers`` are the products that read values with outliers, which a quantizer that makes
    one scale of all numbers has to leave in fp32.
    """

    name: str
    model: onnx.ModelProto
    feeds: Sequence[Feeds]
    outliers: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault in a net.

    Attributes:
        kind: What it is.
        fp32: The fp32 model.
        low: The low model.
        planted: Names of the ops of which any is the culprit.
    """

    kind: str
    fp32: onnx.ModelProto
    low: onnx.ModelProto
    planted: frozenset[str]


class _Writer:
    """Writes a net node by node."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str, count: int = 1, **attributes: Any) -> str:
        """The result of a node, whose name is that of the result."""
        name = f"{kind.lower()}_{len(self.nodes)}"
        outputs = [name, *(f"{name}_{k}" for k in range(1, count))]
        self.nodes.append(helper.make_node(kind, inputs, outputs, name, **attributes))
        return name

    def weight(self, *shape: int, scale: float | None = None) -> str:
        """A random weight; by default it keeps the size of what it multiplies."""
        fan = int(np.prod(shape[1:])) if len(shape) == 4 else shape[-2] if shape[1:] else 1
        factor = 1 / np.sqrt(fan) if scale is None else scale
        return self.constant(self.rng.normal(size=shape).astype(np.float32) * factor)

    def constant(self, array: Any, dtype: Any = np.float32) -> str:
        """A constant."""
        name = f"c{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def model(self, shape: Sequence[int | str], output: str) -> onnx.ModelProto:
        """The model of the input ``x``."""
        given = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
        end = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "net", [given], [end], self.tensors)
        opset = [helper.make_opsetid("", _OPSET)]
        return helper.make_model(graph, opset_imports=opset, ir_version=9)


def transformer(seed: int = 0, width: int = 64, heads: int = 4, layers: int = 2) -> Net:
    """Blocks of attention and a feed-forward net, each after a layer norm."""
    net = _Writer(seed)
    x = "x"
    size = width // heads
    for _ in range(layers):
        scale, shift = (net.constant(a) for a in (np.ones(width), np.zeros(width)))
        normed = net.op("LayerNormalization", x, scale, shift)
        shape = net.constant([0, 0, heads, size], np.int64)
        parts: list[str] = []
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
            product = net.op("MatMul", normed, net.weight(width, width))
            parts.append(net.op("Transpose", net.op("Reshape", product, shape), perm=perm))
        query, key, value = parts
        scores = net.op("Mul", net.op("MatMul", query, key), net.constant(size**-0.5))
        mixed = net.op("MatMul", net.op("Softmax", scores, axis=-1), value)
        flat = net.op("Transpose", mixed, perm=[0, 2, 1, 3])
        joined = net.op("Reshape", flat, net.constant([0, 0, width], np.int64))
        x = net.op("Add", x, net.op("MatMul", joined, net.weight(width, width)))
        scale, shift = (net.constant(a) for a in (np.ones(width), np.zeros(width)))
        normed = net.op("LayerNormalization", x, scale, shift)
        hidden = net.op("Relu", net.op("MatMul", normed, net.weight(width, 2 * width)))
        x = net.op("Add", x, net.op("MatMul", hidden, net.weight(2 * width, width)))
    model = net.model(["n", 16, width], x)
    return Net(name="transformer", model=model, feeds=_drawn(seed, (8, 16, width)))


def lstm(seed: int = 1, width: int = 32) -> Net:
    """A projection, two LSTMs, and a head."""
    net = _Writer(seed)
    x = net.op("Tanh", net.op("MatMul", "x", net.weight(width, width)))
    for _ in range(2):
        w, r = (net.weight(1, 4 * width, width, scale=width**-0.5) for _ in range(2))
        b = net.weight(1, 8 * width, scale=0.1)
        steps = net.op("LSTM", x, w, r, b, hidden_size=width)
        x = net.op("Squeeze", steps, net.constant([1], np.int64))
        x = net.op("Add", net.op("MatMul", x, net.weight(width, width)), net.weight(width))
    x = net.op("Relu", x)
    x = net.op("MatMul", x, net.weight(width, 16))
    x = net.op("Mul", net.op("Sigmoid", x), net.constant(4.0))
    return Net(
        name="lstm", model=net.model([12, "n", width], x), feeds=_drawn(seed, (12, 8, width))
    )


def cnn(seed: int = 2, width: int = 16) -> Net:
    """Convolutions, pooling, and a head."""
    net = _Writer(seed)
    x, before = "x", 3
    for stage in range(3):
        for _ in range(2):
            kernel = net.weight(width, before, 3, 3)
            bias = net.weight(width, scale=0.1)
            x = net.op("Relu", net.op("Conv", x, kernel, bias, pads=[1, 1, 1, 1]))
            before = width
        if stage < 2:
            x = net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = net.op("Flatten", net.op("GlobalAveragePool", x))
    x = net.op("Gemm", x, net.weight(width, 10), net.weight(10, scale=0.1))
    return Net(
        name="cnn", model=net.model(["n", 3, 16, 16], x), feeds=_drawn(seed, (8, 3, 16, 16))
    )


def resnet() -> Net:
    """ResNet-20, trained on CIFAR-10."""
    case = shared_case("cifar10_resnet20")
    feeds = [*case.calib(16)]
    batch = {"input": np.concatenate([f["input"] for f in feeds])}
    return Net(name="ResNet-20", model=onnx.load(case.model()), feeds=[batch])


def minilm() -> Net:
    """MiniLM-L6, a text encoder.

    The second product of each feed-forward net of BERT and its like reads outliers (Bondarenko
    et al., "Understanding and overcoming the challenges of efficient transformer
    quantization", EMNLP 2021).
    """
    case = shared_case("sts_minilm_l6")
    feeds = [*case.calib(4)]
    model = onnx.load(case.model())
    second = (n.name for n in model.graph.node if n.op_type == "MatMul")
    outliers = frozenset(n for n in second if "/output/dense/" in n and "/attention/" not in n)
    return Net(name="MiniLM-L6", model=model, feeds=feeds[:2], outliers=outliers)


def _drawn(seed: int, shape: tuple[int, ...]) -> list[Feeds]:
    rng = np.random.default_rng(seed + 100)
    return [{"x": rng.normal(size=shape).astype(np.float32)} for _ in range(2)]


# A naive conversion to fp16, as scripts of users do it: every float becomes fp16.


def to_fp16(model: onnx.ModelProto) -> onnx.ModelProto:
    """All constants, ops and values in fp16; inputs and outputs stay fp32, by casts."""
    low = onnx.ModelProto()
    low.CopyFrom(model)
    graph = low.graph
    del graph.value_info[:]
    _halve_constants(graph)
    floats = [v.name for v in graph.input if v.type.tensor_type.elem_type == TensorProto.FLOAT]
    known = {tensor.name for tensor in graph.initializer}
    casts: list[onnx.NodeProto] = []
    for name in floats:
        if name not in known:
            _rename_reads(graph, name, f"{name}_fp16")
            casts.append(_cast(name, f"{name}_fp16", TensorProto.FLOAT16))
    for output in graph.output:
        if output.type.tensor_type.elem_type == TensorProto.FLOAT:
            inner = f"{output.name}_fp16"
            for node in graph.node:
                node.output[:] = [inner if o == output.name else o for o in node.output]
            _rename_reads(graph, output.name, inner)
            graph.node.append(_cast(inner, output.name, TensorProto.FLOAT))
    rest = [*graph.node]
    del graph.node[:]
    graph.node.extend([*casts, *rest])
    return low


def _halve_constants(graph: onnx.GraphProto) -> None:
    with np.errstate(over="ignore"):
        for tensor in graph.initializer:
            _halve(tensor)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.name == "value" and attribute.HasField("t"):
                    _halve(attribute.t)
                if node.op_type == "Cast" and attribute.i == TensorProto.FLOAT:
                    attribute.i = TensorProto.FLOAT16


def _halve(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        array = numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _cast(source: str, result: str, to: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [result], f"cast_{result}", to=to)


def _rename_reads(graph: onnx.GraphProto, name: str, new: str) -> None:
    for node in graph.node:
        node.input[:] = [new if i == name else i for i in node.input]


# Codes of 8 bits with one scale for each tensor, as simple quantizers have them.


def to_int8(
    model: onnx.ModelProto, feeds: Sequence[Feeds], keep: Collection[str] = ()
) -> onnx.ModelProto:
    """QuantizeLinear and DequantizeLinear before each product's operand and weight.

    The products named in ``keep`` stay in fp32.
    """
    low = onnx.ModelProto()
    low.CopyFrom(model)
    graph = low.graph
    weights = {t.name: t for t in graph.initializer}
    products = [n for n in graph.node if n.op_type in ("Conv", "MatMul", "Gemm")]
    products = [n for n in products if n.name not in keep]
    largest = magnitudes(model, {n.input[0] for n in products}, feeds)
    made: list[onnx.NodeProto] = []
    codes: dict[str, str] = {}
    for node in products:
        for port in range(2):
            name = node.input[port]
            if name not in codes:
                if name in weights:
                    array = numpy_helper.to_array(weights[name])
                    scale = float(np.abs(array).max()) / 127
                elif port == 0 and name in largest:
                    scale = largest[name] / 127
                else:
                    continue
                codes[name] = f"{name}_read"
                for suffix, value in (("scale", np.float32(scale)), ("zero", np.int8(0))):
                    tensor = numpy_helper.from_array(np.array(value), f"{name}_{suffix}")
                    graph.initializer.append(tensor)
                ends = [f"{name}_scale", f"{name}_zero"]
                coded = [name, *ends], [f"{name}_codes"]
                made.append(helper.make_node("QuantizeLinear", *coded, f"q_{name}"))
                back = [f"{name}_codes", *ends], [f"{name}_read"]
                made.append(helper.make_node("DequantizeLinear", *back, f"dq_{name}"))
            node.input[port] = codes[name]
    return _sorted(low, made)


def _sorted(model: onnx.ModelProto, more: Sequence[onnx.NodeProto]) -> onnx.ModelProto:
    """The model with more nodes, each after those that it reads."""
    graph = model.graph
    waiting = [*more, *graph.node]
    known = {t.name for t in graph.initializer} | {v.name for v in graph.input} | {""}
    order: list[onnx.NodeProto] = []
    while waiting:
        ready = [n for n in waiting if known.issuperset(n.input)]
        assert ready
        order += ready
        known |= {o for n in ready for o in n.output}
        waiting = [n for n in waiting if not known.issuperset(n.output)]
    del graph.node[:]
    graph.node.extend(order)
    return model


def magnitudes(
    model: onnx.ModelProto, names: set[str], feeds: Sequence[Feeds]
) -> dict[str, float]:
    """The largest magnitudes of these values, by name."""
    import onnxruntime

    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    inputs = {v.name for v in model.graph.input}
    made = {o for n in model.graph.node for o in n.output}
    wanted = sorted(names & made)
    del shown.graph.output[:]
    for name in wanted:
        shown.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        shown.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found = dict.fromkeys(wanted, 0.0)
    for feed in feeds:
        for name, given in zip(wanted, session.run(wanted, feed), strict=True):
            array: NDArray[Any] = np.asarray(given)
            found[name] = max(found[name], float(np.abs(array).max(initial=0.0)))
        for name in names & inputs:
            found[name] = max(found.get(name, 0.0), float(np.abs(feed[name]).max()))
    return found


# Faults.


@dataclass(slots=True)
class _Planter:
    """Puts nodes behind a value of a copy of a net."""

    model: onnx.ModelProto
    value: str

    @classmethod
    def at(cls, net: Net, value: str) -> _Planter:
        copy = onnx.ModelProto()
        copy.CopyFrom(net.model)
        return cls(copy, value)

    def constant(self, name: str, number: float) -> str:
        """A scalar constant."""
        tensor = numpy_helper.from_array(np.array(number, np.float32), f"planted_{name}")
        self.model.graph.initializer.append(tensor)
        return tensor.name

    def put(self, *steps: tuple[str, Sequence[str], str]) -> onnx.ModelProto:
        """Insert nodes: op type, inputs, and name; readers read the last one's result."""
        graph = self.model.graph
        made = [helper.make_node(k, i, [f"plant_{n}"], f"plant/{n}") for k, i, n in steps]
        _rename_reads(graph, self.value, made[-1].output[0])
        for node in made:
            node.input[:] = [self.value if i == "HERE" else i for i in node.input]
        at = next(k for k, n in enumerate(graph.node) if self.value in n.output) + 1
        nodes = [*graph.node]
        del graph.node[:]
        graph.node.extend([*nodes[:at], *made, *nodes[at:]])
        return self.model


def overflow(net: Net, value: str, largest: float) -> Fault:
    """A value is scaled beyond fp16's range and back, by powers of two."""
    plant = _Planter.at(net, value)
    up = 2.0 ** np.ceil(np.log2(4 * _MOST_FP16 / largest))
    model = plant.put(
        ("Mul", ["HERE", plant.constant("up", _half(up))], "half"),
        ("Mul", ["plant_half", plant.constant("rest", up / _half(up))], "up"),
        ("Mul", ["plant_up", plant.constant("down", 1 / _half(up))], "down"),
        ("Mul", ["plant_down", plant.constant("last", _half(up) / up)], "last"),
    )
    return _low("overflow", model, "plant/up", "plant/down")


def _half(power: float) -> float:
    """A power of two, about the square root of one, so that it is a number of fp16."""
    return float(2.0 ** (np.log2(power) // 2))


def cancellation(net: Net, value: str, largest: float) -> Fault:
    """A large number is added to a value and subtracted again."""
    plant = _Planter.at(net, value)
    offset = plant.constant("offset", 2.0 ** np.ceil(np.log2(256 * largest)))
    model = plant.put(("Add", ["HERE", offset], "add"), ("Sub", ["plant_add", offset], "sub"))
    return _low("cancellation", model, "plant/add", "plant/sub")


def absorbed(net: Net, value: str, largest: float) -> Fault:
    """A norm whose sum of squares is Inf in fp16, so that it gives zeros."""
    plant = _Planter.at(net, value)
    scale = 2.0 ** np.ceil(np.log2(4096 / largest))
    model = plant.put(
        ("Mul", ["HERE", plant.constant("scale", scale)], "scaled"),
        ("Mul", ["plant_scaled", "plant_scaled"], "square"),
        ("ReduceMean", ["plant_square"], "mean"),
        ("Sqrt", ["plant_mean"], "root"),
        ("Div", ["plant_scaled", "plant_root"], "normed"),
        ("Mul", ["plant_normed", plant.constant("back", largest / 4)], "back"),
    )
    return _low("absorbed Inf", model, "plant/square", "plant/mean", "plant/root")


def mask(net: Net, value: str, largest: float) -> Fault:
    """A mask that masks nothing: 0 times -3.4e38, which is NaN in fp16."""
    del largest
    plant = _Planter.at(net, value)
    lowest = plant.constant("lowest", float(np.finfo(np.float32).min))
    model = plant.put(
        ("Mul", ["HERE", plant.constant("none", 0.0)], "off"),
        ("Mul", ["plant_off", lowest], "mask"),
        ("Add", ["HERE", "plant_mask"], "masked"),
    )
    return _low("mask", model, "plant/mask")


def together(net: Net, value: str, largest: float) -> Fault:
    """Two ops, of which one alone in fp32 suffices: the larger of their results counts."""
    del largest
    plant = _Planter.at(net, value)
    model = plant.put(
        ("Abs", ["HERE"], "size"),
        ("Mul", ["plant_size", plant.constant("one", 1.0)], "first"),
        ("Mul", ["plant_size", plant.constant("other", 1.0)], "second"),
        ("Max", ["plant_first", "plant_second"], "most"),
        ("Sign", ["HERE"], "sign"),
        ("Mul", ["plant_most", "plant_sign"], "signed"),
    )
    fault = _low("together", model, "plant/first", "plant/second")
    for tensor in fault.low.graph.initializer:  # both compute half of it
        if tensor.name in ("planted_one", "planted_other"):
            array = numpy_helper.to_array(tensor) / 2
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return fault


def wrong_kernel(net: Net, node: str) -> Fault:
    """The low product computes with weights in another order."""
    low = to_fp16(net.model)
    weights = {t.name: t for t in low.graph.initializer}
    (found,) = (n for n in low.graph.node if n.name == node)
    weight = weights[found.input[1]]
    array = numpy_helper.to_array(weight)
    own = numpy_helper.from_array(
        np.ascontiguousarray(np.roll(array, 1, -1)), f"{node}_rolled"
    )
    low.graph.initializer.append(own)
    found.input[1] = own.name
    return Fault(kind="wrong kernel", fp32=net.model, low=low, planted=frozenset({node}))


def outlier(net: Net, node: str, factor: float = 1024.0) -> Fault:
    """A channel of a product's operand is large, and its weight small: bad for int8."""
    model = onnx.ModelProto()
    model.CopyFrom(net.model)
    weights = {t.name: t for t in model.graph.initializer}
    (found,) = (n for n in model.graph.node if n.name == node)
    weight = numpy_helper.to_array(weights[found.input[1]]).copy()
    is_conv = found.op_type == "Conv"
    channels = weight.shape[1] if is_conv else weight.shape[0]
    gains = np.ones(channels, np.float32)
    gains[channels // 3] = factor
    if is_conv:
        weight /= gains[None, :, None, None]
        gains = gains[None, :, None, None]
    else:
        weight /= gains[:, None]
    scaled = numpy_helper.from_array(weight.astype(np.float32), f"{node}_weight_scaled")
    gain = numpy_helper.from_array(np.ascontiguousarray(gains), f"{node}_gains")
    model.graph.initializer.extend([scaled, gain])
    given = found.input[0]
    found.input[0], found.input[1] = "plant_outlier", scaled.name
    nodes = [*model.graph.node]
    at = nodes.index(found)
    del model.graph.node[:]
    made = helper.make_node("Mul", [given, gain.name], ["plant_outlier"], "plant/outlier")
    model.graph.node.extend([*nodes[:at], made, *nodes[at:]])
    low = to_int8(model, net.feeds, net.outliers - {node})
    return Fault(kind="outlier channel", fp32=model, low=low, planted=frozenset({node}))


def _low(kind: str, model: onnx.ModelProto, *planted: str) -> Fault:
    return Fault(kind=kind, fp32=model, low=to_fp16(model), planted=frozenset(planted))


def own_outliers(net: Net) -> Iterator[Fault]:
    """A net that has outliers of its own, in int8 with one scale for each value."""
    if net.outliers:
        low = to_int8(net.model, net.feeds)
        yield Fault(kind="own outliers", fp32=net.model, low=low, planted=net.outliers)


Planted = Callable[[Net, str, float], Fault]
_BEHIND: Final[tuple[Planted, ...]] = (overflow, cancellation, absorbed, mask, together)


def places(net: Net) -> tuple[list[str], dict[str, float]]:
    """Names of products with constant weights, and magnitudes of their results, by node."""
    weights = {t.name for t in net.model.graph.initializer}
    products = [
        n
        for n in net.model.graph.node
        if n.op_type in ("Conv", "MatMul", "Gemm") and n.input[1] in weights
    ]
    ends = {v.name for v in net.model.graph.output}
    inner = [n for n in products if n.output[0] not in ends]
    found = magnitudes(net.model, {n.output[0] for n in inner}, net.feeds)
    return [n.name for n in products], {n.output[0]: found[n.output[0]] for n in inner}


def faults(net: Net, seed: int = 0) -> Iterator[Fault]:
    """Ten faults of seven kinds, at places that are drawn."""
    rng = np.random.default_rng(seed)
    products, results = places(net)
    values = [*results]
    kinds = [*_BEHIND, *(_BEHIND[k] for k in rng.permutation(len(_BEHIND))[:1])]
    for plant in kinds:
        value = values[int(rng.integers(len(values)))]
        yield plant(net, value, results[value])
    for node in rng.choice(products[1:], 2, replace=False):
        yield wrong_kernel(net, str(node))
    for node in rng.choice(products[1:], 2, replace=False):
        yield outlier(net, str(node))
