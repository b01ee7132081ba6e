"""Sites: channels that can be divided in the op that makes them and multiplied in readers.

Laws: whatever positive numbers the channels of a site are divided by, the model computes the
same; with powers of two bit for bit, unless numbers overflow. Only positively homogeneous ops
stand in between: Relu, pooling, and ops that only move numbers. A clip (Relu6) is not one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from finecast.graph import Graph, Node, Value
from finecast.planning.adjustments import constant_at, scalable

CONVOLUTIONS: Final = frozenset({"conv", "group_conv"})
LINEAR: Final = CONVOLUTIONS | {"linear", "matmul", "gemm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """A constant at input ``port`` of ``node``, with a site's channels along ``axis`` (< 0).

    Each channel has ``times`` consecutive elements along it.
    """

    node: int
    port: int
    axis: int
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A product that reads the channels along ``axis`` of ``value``, and its ``weights``.

    ``apart``: each output channel depends on one channel only, as in depthwise convolutions.
    """

    value: int
    axis: int
    weights: Channels
    apart: bool = False

    @property
    def node(self) -> int:
        """Id of the product."""
        return self.weights.node


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Channels that can be divided in the constants ``divided`` and multiplied in ``readers``.

    ``maker`` is the op that makes the channels. If it is None, no constant can be divided and
    a division has to be inserted in front of each reader.
    """

    channels: int
    maker: int | None
    divided: tuple[Channels, ...]
    readers: tuple[Reader, ...]


def sites(graph: Graph) -> tuple[Site, ...]:
    """The sites outside control-flow bodies whose channels an op of the graph makes.

    A product is a reader of one site at most: of the last op that could make its channels.
    """
    found: list[Site] = []
    read: set[int] = set()
    for node in reversed(graph.nodes):
        site = None if node.region else _site(graph, node)
        if site is not None and read.isdisjoint(r.node for r in site.readers):
            read |= {r.node for r in site.readers}
            found.append(site)
    return tuple(reversed(found))


def sites_in_front(graph: Graph) -> tuple[Site, ...]:
    """A site without maker for each value that matrix products read, outside bodies.

    Only of products that read channels along the last axis, where the inserted division takes
    little time beside the product.
    """
    readers: dict[int, list[Reader]] = {}
    for node in graph.nodes:
        value = graph.read(node, 0)
        if node.op in CONVOLUTIONS or node.region:
            continue
        if value is None or value.constant is not None:
            continue
        weights = _weights_read(graph, node, value, -1)
        if weights is not None and value.producer is not None:
            readers.setdefault(value.id, []).append(weights)
    return tuple(
        Site(
            channels=_channels_read(graph, those[0].weights),
            maker=None,
            divided=(),
            readers=tuple(those),
        )
        for those in readers.values()
    )


def _channels_read(graph: Graph, read: Channels) -> int:
    weights = constant_at(graph, graph.nodes[read.node], read.port)
    size = ((weights and weights.shape) or ())[read.axis]
    assert isinstance(size, int)
    return size // read.times


# ------------------------------------------------------------------- ops that make channels


def _site(graph: Graph, node: Node) -> Site | None:
    made = _made(graph, node)
    out = (
        graph.values[node.outputs[0]] if node.outputs and node.outputs[0] is not None else None
    )
    if made is None or out is None:
        return None
    count, axis, divided = made
    region = _Region(graph=graph, channels=count, divided=[*divided])
    if count < 2 or not region.follow(out, axis) or not region.readers:
        return None
    return Site(
        channels=count,
        maker=node.id,
        divided=tuple(region.divided),
        readers=tuple(region.readers),
    )


# Number of channels that an op makes, their axis in its result, and its constants to divide.
_Made = tuple[int, int, list[Channels]]


def _made(graph: Graph, node: Node) -> _Made | None:
    if node.op in LINEAR:
        return _made_by_product(graph, node)
    ports = _GAINS.get(node.op)
    if ports is not None:
        axis = _norm_axis(graph, node)
        return None if axis is None else _made_by(graph, node, ports, axis)
    if node.op == "mul":
        constants = [p for p in (0, 1) if constant_at(graph, node, p) is not None]
        return _made_by(graph, node, tuple(constants), -1) if len(constants) == 1 else None
    return None


# Input ports of a norm's scale and bias.
_GAINS: Final[Mapping[str, tuple[int, ...]]] = {
    "layer_norm": (1, 2),
    "rms_norm": (1,),
    "batch_norm": (1, 2),
    "instance_norm": (1, 2),
}


def _norm_axis(graph: Graph, node: Node) -> int | None:
    """The axis of the norm's result that its scale is along; None if there are several."""
    source = graph.read(node, 0)
    shape = None if source is None else source.shape
    if node.op in ("batch_norm", "instance_norm"):
        return None if shape is None else 1 - len(shape)
    axis = node.attributes.get("axis", -1)
    last = axis == -1 or (shape is not None and axis == len(shape) - 1)
    return -1 if last else None


def _made_by(graph: Graph, node: Node, ports: tuple[int, ...], axis: int) -> _Made | None:
    """Channels made by the constants at ``ports``, each along its last axis."""
    given = [p for p in ports if p < len(node.inputs) and node.inputs[p] is not None]
    values = [constant_at(graph, node, p) for p in given]
    sizes = {v.shape[-1] for v in values if v is not None and v.shape}
    count = sizes.pop() if len(sizes) == 1 else None
    if not isinstance(count, int) or None in values:
        return None
    if not all(v is not None and scalable(v, count, -1) for v in values):
        return None
    return count, axis, [Channels(node=node.id, port=p, axis=-1) for p in given]


def _made_by_product(graph: Graph, node: Node) -> _Made | None:
    weights = constant_at(graph, node, 1)
    shape = None if weights is None else weights.shape
    convolves = node.op in CONVOLUTIONS
    if weights is None or not shape or not (convolves or len(shape) == 2):
        return None
    if node.op == "group_conv" and shape[1] != 1:
        return None  # its output channels lie along two axes of the weights
    by_row = convolves or node.op == "linear" or node.attributes.get("transB", 0)
    along = -len(shape) if by_row else -1
    count = shape[along]
    if not isinstance(count, int) or not scalable(weights, count, along):
        return None
    divided = [Channels(node=node.id, port=1, axis=along)]
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        bias = constant_at(graph, node, 2)
        if bias is None or not scalable(bias, count, -1):
            return None
        divided.append(Channels(node=node.id, port=2, axis=-1))
    return count, channel_axis(node, shape) if convolves else -1, divided


def channel_axis(convolution: Node, weights: tuple[object, ...]) -> int:
    """The (negative) axis of the channels in a convolution's operand and result.

    Found by the rank of its weights; ``group_conv`` has one axis more there, the groups.
    """
    return 1 - len(weights) + (convolution.op == "group_conv")


# ------------------------------------------------------------------- ops that read channels


@dataclass(slots=True, kw_only=True)
class _Region:
    """The ops between an op that makes channels and the products that read them.

    ``divided`` and ``readers`` are collected by ``follow``.
    """

    graph: Graph
    channels: int
    divided: list[Channels]
    readers: list[Reader] = field(default_factory=list[Reader])

    def follow(self, value: Value, axis: int) -> bool:
        """Whether every reader of ``value`` is a product, or an op that hands channels on."""
        graph = self.graph
        if value.is_output or not value.uses:
            return False
        for index in value.uses:
            node = graph.nodes[index]
            if node.region or node.inputs.count(value.id) != 1:
                return False
            if node.op in LINEAR:
                reader = _weights_read(graph, node, value, axis)
                if reader is None or _channels_read(graph, reader.weights) != self.channels:
                    return False
                self.readers.append(reader)
                continue
            axes = [*self._handed_on(node, value, axis)]
            outs = [graph.values[o] for o in node.outputs if o is not None]
            used = [o for o in outs if o.uses or o.is_output]
            if not axes or used != outs[:1] or not self.follow(outs[0], axes[0]):
                return False
        return True

    def _handed_on(self, node: Node, value: Value, axis: int) -> Iterator[int]:
        """Yields the axis of the channels in the result, if the op hands channels on."""
        if node.op in _ELEMENTWISE and node.inputs[0] == value.id:
            others = (constant_at(self.graph, node, p) for p in range(1, len(node.inputs)))
            if all(v is not None for v in others):
                yield axis
        elif node.op in ("add", "sub"):
            port = 1 - node.inputs.index(value.id)
            added = constant_at(self.graph, node, port)
            if added is not None and scalable(added, self.channels, axis):
                self.divided.append(Channels(node=node.id, port=port, axis=axis))
                yield axis
        elif node.op == "mul" or (node.op == "div" and node.inputs[0] == value.id):
            if constant_at(self.graph, node, 1 - node.inputs.index(value.id)) is not None:
                yield axis
        else:
            move = _MOVES.get(node.op)
            found = None if move is None else move(self.graph, node, value, axis)
            if found is not None and node.inputs[0] == value.id:
                yield found


# Ops by element; operands other than the first, as a slope, have to be constants.
_ELEMENTWISE: Final = frozenset({"relu", "leaky_relu", "prelu", "abs", "neg", "identity"})


def _pooled(graph: Graph, node: Node, value: Value, axis: int) -> int | None:
    """Pooling is along all axes after the second, so channels have to be along the second."""
    shape = value.shape
    return axis if shape is not None and axis == 1 - len(shape) else None


def _transposed(graph: Graph, node: Node, value: Value, axis: int) -> int | None:
    order = node.attributes.get("perm")
    if not isinstance(order, tuple):
        return None
    return order.index(axis + len(order)) - len(order)


def _reduced(graph: Graph, node: Node, value: Value, axis: int) -> int | None:
    """The channels' axis behind a reduction along other axes; None along theirs."""
    shape, axes = value.shape, reduced_axes(graph, node)
    if shape is None or axes is None:
        return None
    behind = {int(a) - len(shape) if int(a) >= 0 else int(a) for a in axes}
    if axis in behind:
        return None
    kept = node.attributes.get("keepdims", 1)
    return axis if kept else axis + sum(a > axis for a in behind)


def reduced_axes(graph: Graph, node: Node) -> tuple[int, ...] | None:
    """The axes of a reduction; None where they are computed, or not stated: all of them."""
    given = constant_at(graph, node, 1)
    if given is not None and given.constant is not None:
        return tuple(int(i) for i in given.constant.read().reshape(-1))
    axes = node.attributes.get("axes")
    return tuple(map(int, axes)) if isinstance(axes, tuple) else None


def _flattened(graph: Graph, node: Node, value: Value, axis: int) -> int | None:
    """Accepts [samples, channels, 1, ...] becoming [samples, channels] only."""
    before = value.shape
    out = graph.values[node.outputs[0]] if node.outputs[0] is not None else None
    after = None if out is None else out.shape
    if before is None or after is None or len(after) != 2 or axis != 1 - len(before):
        return None
    single = all(d == 1 for d in before[2:])
    return -1 if single and before[1] == after[1] else None


# For ops that move or reduce: the function that gives the channels' axis in the result.
_MOVES: Final[Mapping[str, Callable[[Graph, Node, Value, int], int | None]]] = {
    "max_pool": _pooled,
    "average_pool": _pooled,
    "global_max_pool": _pooled,
    "global_average_pool": _pooled,
    "transpose": _transposed,
    "reduce_mean": _reduced,
    "reduce_sum": _reduced,
    "reduce_max": _reduced,
    "reduce_min": _reduced,
    "flatten": _flattened,
    "reshape": _flattened,
    "squeeze": _flattened,
}


def _weights_read(graph: Graph, node: Node, value: Value, axis: int) -> Reader | None:
    """``node`` as a reader of the channels along ``axis`` of ``value``; None if it is none."""
    if node.op not in LINEAR or node.inputs[0] != value.id or node.inputs.count(value.id) > 1:
        return None
    weights = constant_at(graph, node, 1)
    shape = None if weights is None else weights.shape
    if weights is None or not shape:
        return None
    convolves = node.op in CONVOLUTIONS
    along = _conv_axis(node, shape) if convolves else _product_axis(node, shape)
    if along is None or axis != (channel_axis(node, shape) if convolves else -1):
        return None
    channels, times = along
    size = shape[channels]
    if not isinstance(size, int) or not scalable(weights, size, channels):
        return None
    read = Channels(node=node.id, port=1, axis=channels, times=times)
    apart = convolves and channels == -len(shape)
    return Reader(value=value.id, axis=axis, weights=read, apart=apart)


def _product_axis(node: Node, shape: tuple[object, ...]) -> tuple[int, int] | None:
    """Axis and ``times`` of the channels in the weights of a matrix product."""
    if len(shape) != 2 or node.attributes.get("transA", 0):
        return None
    by_row = node.op == "linear" or node.attributes.get("transB", 0)
    return (-1 if by_row else -2), 1


def _conv_axis(node: Node, shape: tuple[object, ...]) -> tuple[int, int] | None:
    """Axis and ``times`` of the channels in a convolution's weights; None with other groups.

    Groups have to be depthwise: one input channel each.
    """
    if node.op == "group_conv":
        return (-len(shape), 1) if shape[2] == 1 else None
    groups, made, read = node.attributes.get("group", 1), shape[0], shape[1]
    if groups == 1:
        return 1 - len(shape), 1
    if read != 1 or not isinstance(made, int) or not isinstance(groups, int) or made % groups:
        return None
    return -len(shape), made // groups
