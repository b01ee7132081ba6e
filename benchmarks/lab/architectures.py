"""Graphs of simulated nets, by family and architecture, of 20 to 600 ops.

Each family has an architecture that is looked at, and one that only the last run sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from finecast.graph import ConstantStats, Graph, Node, Value
from finecast.graph.builder import GraphBuilder
from finecast.numbers.formats import Format
from finecast.ops import OpKind

Shape = tuple[int, ...]

PRODUCTS: Final = frozenset({OpKind.CONV, OpKind.MATMUL})
_ADMITS: Final = frozenset({Format.FP32, Format.BF16, Format.FP16, Format.INT8})


@dataclass(slots=True)
class Sketch:
    """A graph that is drawn op by op.

    Attributes:
        kernels: Ids of the nodes that an engine runs in one kernel.
        flops: Operations of products, by node id; 0 of others.
        moved: Bytes that a node reads and writes in fp32.
    """

    kernels: list[list[int]] = field(default_factory=list[list[int]])
    flops: list[float] = field(default_factory=list[float])
    moved: list[float] = field(default_factory=list[float])
    _builder: GraphBuilder[str] = field(default_factory=GraphBuilder[str])
    _shapes: list[Shape] = field(default_factory=list[Shape])
    _weights: dict[int, int] = field(default_factory=dict[int, int])
    _inputs: set[int] = field(default_factory=set[int])

    def input(self, *shape: int) -> int:
        """A new input of the model."""
        value = self._value(f"x{len(self._inputs)}", shape)
        self._inputs.add(value)
        return value

    def shape(self, value: int) -> Shape:
        """The shape of a value."""
        return self._shapes[value]

    def op(
        self,
        kind: str,
        *reads: int,
        shape: Shape | None = None,
        weight: Shape = (),
        work: float = 0.0,
        fused: bool = False,
    ) -> int:
        """Add an op; gives the id of its result.

        Args:
            kind: finecast's name of the op.
            reads: The values that it reads.
            shape: The shape of its result; by default that of its first operand.
            weight: The shape of a constant that it reads, too.
            work: Operations of a product.
            fused: Whether it runs in the kernel of the op that makes its first operand.
        """
        number = len(self._builder.nodes)
        name = f"{kind}_{number}"
        inputs = [*reads]
        if weight:
            inputs.append(self._value(f"{name}.weight", weight))
            self._weights[inputs[-1]] = math.prod(weight)
        result = self._value(f"{name}.y", shape or self._shapes[reads[0]])
        self._builder.add(
            Node(
                id=number,
                name=name,
                op=kind,
                native=f"lab::{kind}",
                inputs=tuple(inputs),
                outputs=(result,),
                follows_in=(True,) * len(inputs),
                follows_out=(True,),
                format=Format.FP32,
                admits=_ADMITS,
            )
        )
        maker = self._builder.producer(reads[0])
        kernel = next((k for k in self.kernels[::-1] if maker in k), None) if fused else None
        if kernel is None:
            self.kernels.append([number])
        else:
            kernel.append(number)
        self.flops.append(work)
        self.moved.append(4.0 * sum(math.prod(self._shapes[v]) for v in (*inputs, result)))
        return result

    def conv(self, x: int, channels: int, *, size: int = 3, stride: int = 1) -> int:
        """A convolution; a value is [channels, height, width]."""
        came, height, width = self.shape(x)
        shape = channels, max(height // stride, 1), max(width // stride, 1)
        work = 2.0 * math.prod(shape) * came * size * size
        return self.op("conv", x, shape=shape, weight=(channels, came, size, size), work=work)

    def depthwise(self, x: int, *, size: int = 3, stride: int = 1) -> int:
        """A convolution of each channel by itself."""
        came, height, width = self.shape(x)
        shape = came, max(height // stride, 1), max(width // stride, 1)
        work = 12.0 * math.prod(shape) * size * size  # far from the rate of other products
        return self.op("group_conv", x, shape=shape, weight=(came, 1, size, size), work=work)

    def linear(self, x: int, width: int, *, bias: bool = True) -> int:
        """A product with a weight, and a sum with a bias in the same kernel."""
        *rows, came = self.shape(x)
        work = 2.0 * math.prod(rows) * came * width
        shape = (*rows, width)
        product = self.op("matmul", x, shape=shape, weight=(came, width), work=work)
        return self.op("add", product, weight=(width,), fused=True) if bias else product

    def product(self, a: int, b: int, shape: Shape, inner: int) -> int:
        """A product of two values."""
        return self.op("matmul", a, b, shape=shape, work=2.0 * math.prod(shape) * inner)

    def finish(self, digest: str) -> Graph:
        """The graph; what nothing reads are its outputs."""
        builder = self._builder
        values = [
            Value(
                id=i,
                name=key,
                dtype="fp32",
                shape=self._shapes[i],
                producer=builder.producer(i),
                uses=builder.uses(i),
                constant=_constant(self._weights[i]) if i in self._weights else None,
                is_input=i in self._inputs,
                is_output=not builder.uses(i),
            )
            for i, key in enumerate(builder.keys)
        ]
        return builder.finish(values, digest)

    def _value(self, name: str, shape: Shape) -> int:
        value = self._builder.value(name)
        self._shapes.append(shape)
        return value


def _constant(size: int) -> ConstantStats:
    """A constant whose numbers nobody looks at."""
    return ConstantStats(size=size, read=lambda: np.zeros(1, np.float32))


# ------------------------------------------------------------------------------ architectures

Rng = np.random.Generator


def _blocks(rng: Rng, each: int, most: int) -> int:
    """A number of blocks of ``each`` ops, so that numbers of ops are even in the logarithm."""
    ops = math.exp(rng.uniform(math.log(20), math.log(most)))
    return max(2, round(ops / each))


def residual_cnn(rng: Rng, net: Sketch) -> None:
    """Convolutions with residuals, in four stages, and a classifier."""
    width = int(rng.choice([16, 32, 48]))
    size = int(rng.choice([16, 24, 32]))
    x = net.op("relu", net.conv(net.input(3, size, size), width), fused=True)
    blocks = _blocks(rng, 5, 400)
    for number in range(blocks):
        down = number and number % max(blocks // 4, 1) == 0 and net.shape(x)[1] > 4
        channels = net.shape(x)[0] * (2 if down and net.shape(x)[0] < 256 else 1)
        stride = 2 if down else 1
        y = net.op("relu", net.conv(x, channels, stride=stride), fused=True)
        y = net.conv(y, channels)
        beside = net.conv(x, channels, size=1, stride=stride) if down else x
        x = net.op("relu", net.op("add", y, beside, fused=True), fused=True)
    _classifier(net, x, int(rng.choice([10, 100])))


def dense_cnn(rng: Rng, net: Sketch) -> None:
    """Bottlenecks whose inputs are all results before, joined; with gates of channels."""
    growth, size = int(rng.choice([12, 24])), int(rng.choice([16, 24]))
    x = net.op("relu", net.conv(net.input(3, size, size), 2 * growth), fused=True)
    for number in range(_blocks(rng, 8, 500)):
        y = net.op("relu", net.conv(x, 4 * growth, size=1), fused=True)
        y = net.op("mul", net.conv(y, growth), _gate(net, y, growth))
        came, height, width = net.shape(x)
        x = net.op("concat", x, y, shape=(came + growth, height, width))
        if number % 6 == 5 and height > 4:
            x = net.op("max_pool", x, shape=(came + growth, height // 2, width // 2))
            x = net.conv(x, max((came + growth) // 2, growth), size=1)
    _classifier(net, x, 100)


def _gate(net: Sketch, x: int, channels: int) -> int:
    mean = net.op("reduce_mean", x, shape=(1, net.shape(x)[0]))
    hidden = net.op("relu", net.linear(mean, 8), fused=True)
    return net.op("sigmoid", net.linear(hidden, channels))


def _classifier(net: Sketch, x: int, classes: int) -> None:
    mean = net.op("reduce_mean", x, shape=(1, net.shape(x)[0]))
    net.linear(mean, classes)


def encoder(rng: Rng, net: Sketch) -> None:
    """Transformer blocks with norms behind sums, and a classifier."""
    width, tokens = int(rng.choice([64, 128, 256, 384])), int(rng.choice([16, 32, 64, 128]))
    x = net.op("layer_norm", net.input(tokens, width))
    for _ in range(_blocks(rng, 26, 600)):
        x = net.op("layer_norm", net.op("add", _attention(net, x), x))
        hidden = net.op("gelu", net.linear(x, 4 * width), fused=True)
        x = net.op("layer_norm", net.op("add", net.linear(hidden, width), x))
    net.linear(net.op("tanh", net.linear(x, width)), 2)


def gated_decoder(rng: Rng, net: Sketch) -> None:
    """Transformer blocks with norms in front, gated products and an exact residual stream."""
    width, tokens = int(rng.choice([64, 128, 256])), int(rng.choice([32, 64, 96]))
    x = net.input(tokens, width)
    for _ in range(_blocks(rng, 28, 600)):
        x = net.op("add", x, _attention(net, net.op("rms_norm", x)))
        y = net.op("rms_norm", x)
        gate = net.linear(y, 3 * width, bias=False)
        gate = net.op("mul", gate, net.op("sigmoid", gate))
        y = net.op("mul", gate, net.linear(y, 3 * width, bias=False))
        x = net.op("add", x, net.linear(y, width, bias=False))
    net.linear(net.op("rms_norm", x), 512, bias=False)


def _attention(net: Sketch, x: int) -> int:
    tokens, width = net.shape(x)
    heads, inner = 4, width // 4
    split = heads, tokens, inner

    def head() -> int:
        return net.op("transpose", net.op("reshape", net.linear(x, width)), shape=split)

    query, key, value = head(), head(), head()
    scores = net.product(query, key, (heads, tokens, tokens), inner)
    scores = net.op("softmax", net.op("mul", scores, weight=(1,), fused=True))
    mixed = net.product(scores, value, split, tokens)
    return net.linear(net.op("transpose", mixed, shape=(tokens, width)), width)


def mlp(rng: Rng, net: Sketch) -> None:
    """Products with activations, some with a residual."""
    width, rows = int(rng.choice([64, 128, 256, 512])), int(rng.choice([1, 16, 64]))
    x = net.linear(net.input(rows, 64), width)
    for _ in range(_blocks(rng, 3, 200)):
        y = net.op(str(rng.choice(["relu", "gelu", "tanh"])), net.linear(x, width), fused=True)
        x = net.op("add", y, x) if rng.random() < 0.4 else y
    net.linear(x, int(rng.choice([1, 10])))


def mixer(rng: Rng, net: Sketch) -> None:
    """MLPs over tokens and over channels in turns."""
    width, tokens = int(rng.choice([64, 128, 256])), int(rng.choice([16, 49, 64]))
    x = net.input(tokens, width)
    for _ in range(_blocks(rng, 16, 400)):
        for turned in (True, False):
            y = net.op("layer_norm", x)
            y = net.op("transpose", y, shape=(width, tokens)) if turned else y
            last = net.shape(y)[-1]
            y = net.linear(net.op("gelu", net.linear(y, 2 * last), fused=True), last)
            y = net.op("transpose", y, shape=(tokens, width)) if turned else y
            x = net.op("add", x, y)
    net.linear(net.op("layer_norm", x), 10)


def lstm_decoder(rng: Rng, net: Sketch) -> None:
    """Steps of a recurrent cell, written out, with a classifier at each step."""
    width = int(rng.choice([64, 128, 256]))
    state, cell = net.input(4, width), net.input(4, width)
    x = net.linear(net.input(4, width), width)
    for _ in range(_blocks(rng, 15, 500)):
        gates = net.op("add", net.linear(x, 4 * width), net.linear(state, 4 * width))
        parts = [net.op("slice", gates, shape=(4, width)) for _ in range(4)]
        keep, take, give = (net.op("sigmoid", part) for part in parts[:3])
        new = net.op("mul", take, net.op("tanh", parts[3]))
        cell = net.op("add", net.op("mul", keep, cell), new)
        state = net.op("mul", give, net.op("tanh", cell))
        x = state
    net.linear(x, 64)


def gru_attention(rng: Rng, net: Sketch) -> None:
    """Steps of a gated unit that looks at an encoded sequence at each step."""
    width, tokens = int(rng.choice([64, 128])), int(rng.choice([16, 48]))
    seen = net.op("tanh", net.linear(net.input(tokens, width), width))
    state = net.input(1, width)
    for _ in range(_blocks(rng, 18, 500)):
        scores = net.op("softmax", net.product(state, seen, (1, tokens), width))
        context = net.product(scores, seen, (1, width), tokens)
        both = net.op("concat", state, context, shape=(1, 2 * width))
        keep, reset = (net.op("sigmoid", net.linear(both, width)) for _ in range(2))
        new = net.op("tanh", net.linear(net.op("mul", reset, state), width))
        old = net.op("mul", keep, state)
        state = net.op("add", old, net.op("sub", new, net.op("mul", keep, new)))
    net.linear(state, 64)


def two_heads(rng: Rng, net: Sketch) -> None:
    """A backbone with heads for boxes and scores at each of its last scales."""
    size, width = int(rng.choice([32, 48, 64])), int(rng.choice([16, 24]))
    x = net.op("relu", net.conv(net.input(3, size, size), width, stride=2), fused=True)
    blocks, scales = _blocks(rng, 7, 350), list[int]()
    for number in range(blocks):
        down = number % max(blocks // 3, 1) == 0 and net.shape(x)[1] > 4
        channels = min(net.shape(x)[0] * (2 if down else 1), 192)
        x = net.op("relu", net.conv(x, channels, stride=2 if down else 1), fused=True)
        scales = [*scales[-2:], x] if down else scales
    _heads(net, scales or [x])


def pyramid(rng: Rng, net: Sketch) -> None:
    """A backbone with a pyramid of scales that are summed on the way up, and two heads."""
    size, width = int(rng.choice([32, 48])), int(rng.choice([16, 24]))
    x, scales = net.input(3, size, size), list[int]()
    for number in range(3 * max(_blocks(rng, 12, 350), 1)):
        down = number % 3 == 0 and (not scales or net.shape(x)[1] > 4)
        channels = min(width * 2 ** len(scales), 160)
        x = net.conv(x, channels, stride=2 if down else 1)
        x = net.op("hard_swish", x, fused=True)
        scales = [*scales, x] if down else scales
    top = net.conv(scales[-1], 64, size=1)
    outputs = [top]
    for scale in scales[-2::-1]:
        shape = (64, *net.shape(scale)[1:])
        side = net.conv(scale, 64, size=1)
        top = net.op("add", net.op("resize", top, shape=shape), side)
        outputs.append(net.op("relu", net.conv(top, 64), fused=True))
    _heads(net, outputs[:3])


def _heads(net: Sketch, scales: Sequence[int]) -> None:
    boxes, scores = list[int](), list[int]()
    for scale in scales:
        for wanted, channels in ((boxes, 4), (scores, 20)):
            y = net.conv(net.op("relu", net.conv(scale, 48), fused=True), channels)
            _, height, width = net.shape(y)
            wanted.append(net.op("reshape", y, shape=(height * width, channels)))
    for wanted, channels in ((boxes, 4), (scores, 20)):
        rows = sum(net.shape(v)[0] for v in wanted)
        joined = net.op("concat", *wanted, shape=(rows, channels))
        net.op("sigmoid", joined)


def inverted_residual(rng: Rng, net: Sketch) -> None:
    """Expansions, convolutions of single channels and projections, with residuals."""
    size = int(rng.choice([24, 32, 48]))
    x = net.op("clip", net.conv(net.input(3, size, size), 16, stride=2), fused=True)
    blocks = _blocks(rng, 7, 300)
    for number in range(blocks):
        down = number % max(blocks // 4, 1) == 1 and net.shape(x)[1] > 3
        came = net.shape(x)[0]
        channels = min(came + 16, 160) if down else came
        y = net.op("clip", net.conv(x, 4 * came, size=1), fused=True)
        y = net.op("clip", net.depthwise(y, stride=2 if down else 1), fused=True)
        y = net.conv(y, channels, size=1)
        x = y if down else net.op("add", y, x, fused=True)
    _classifier(net, x, 100)


def shuffled(rng: Rng, net: Sketch) -> None:
    """Half of the channels go through a block, half around it; with gates and hard swish."""
    size, channels = int(rng.choice([24, 32])), int(rng.choice([32, 48, 64]))
    x = net.op("hard_swish", net.conv(net.input(3, size, size), channels, stride=2))
    for number in range(_blocks(rng, 13, 450)):
        _, height, width = net.shape(x)
        half = channels // 2, height, width
        kept, y = (net.op("slice", x, shape=half) for _ in range(2))
        y = net.op("hard_swish", net.conv(y, channels // 2, size=1), fused=True)
        y = net.conv(net.depthwise(y), channels // 2, size=1)
        y = net.op("mul", y, _gate(net, y, channels // 2)) if number % 3 == 2 else y
        x = net.op("concat", kept, y, shape=(channels, height, width))
        x = net.op("transpose", x)
    _classifier(net, x, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Two architectures of a kind: one that is looked at, one for the last run alone."""

    name: str
    seen: Callable[[Rng, Sketch], None]
    held_out: Callable[[Rng, Sketch], None]


FAMILIES: Final[tuple[Family, ...]] = (
    Family(name="cnn", seen=residual_cnn, held_out=dense_cnn),
    Family(name="transformer", seen=encoder, held_out=gated_decoder),
    Family(name="mlp", seen=mlp, held_out=mixer),
    Family(name="recurrent", seen=lstm_decoder, held_out=gru_attention),
    Family(name="detector", seen=two_heads, held_out=pyramid),
    Family(name="mobile", seen=inverted_residual, held_out=shuffled),
)

BY_NAME: Final[Mapping[str, Family]] = {family.name: family for family in FAMILIES}
