"""What a node costs in a format, and what a cast costs: modelled or measured.

Law: times are seconds, never negative, and depend on nothing but the arguments. A format that
a node's engine cannot take costs infinity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from finecast.devices.targets import Target
from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.ops.flops import Shape, Shapes, bytes_moved, flops, port_formats, resolve_shape

# Measured in OpenVINO on a 2-core AVX512-BF16 CPU: a cast that no other op absorbs takes 12 us
# and moves its bytes (fp32 to bf16: 6 an element) at 10 GB/s.
MEASURED_CAST_OVERHEAD_S = 12e-6
MEASURED_CAST_BANDWIDTH_GB_S = 10.0

_GIGA = 1e9
_TERA = 1e12


class CostModel(Protocol):
    """Prices what a plan decides."""

    @property
    def shapes(self) -> Shapes:
        """Observed shapes of values, by id."""
        ...

    def node_time_s(self, graph: Graph, node: Node, fmt: Format) -> float:
        """Seconds that ``node`` takes if it computes in ``fmt``; casts are not included."""
        ...

    def cast_time_s(self, value: Value, src: Format, dst: Format) -> float:
        """Seconds to convert ``value``; zero where both formats are stored alike.

        From a format for operands alone: what an op in it takes more to give fp32.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost:
    """max(operations / rate, bytes / bandwidth) + overhead, on a target.

    Where shapes stay unknown, ``unknown_dim`` stands for each unknown dimension, so that ops
    still compare; a value of unknown rank counts as one element.

    Attributes:
        target: The device.
        shapes: Observed shapes by value id; they win over the graph's.
        unknown_dim: What a symbolic dimension counts as.
    """

    target: Target
    shapes: Shapes = field(default_factory=dict[int, Shape])
    unknown_dim: int = 1

    def node_time_s(self, graph: Graph, node: Node, fmt: Format) -> float:
        """Seconds by the roofline; infinity if the engine has no such format."""
        rate = self.target.engine_for(by_name(node.op).kind).rate_tflops(fmt)
        if rate is None:
            return math.inf
        shapes = self.node_shapes(graph, node)
        compute_s = (flops(graph, node, shapes) or 0.0) / (rate * _TERA)
        moved = bytes_moved(graph, node, port_formats(graph, node, fmt), shapes)
        if moved == 0.0 and compute_s == 0.0:
            return 0.0  # a view: no kernel at all
        memory_s = (moved or 0.0) / (self.target.bandwidth_gb_s * _GIGA)
        return max(compute_s, memory_s) + self.target.op_overhead_s

    def cast_time_s(self, value: Value, src: Format, dst: Format) -> float:
        """Seconds to read in one format and write in the other; zero where casts are free."""
        if src.storage is dst.storage or self.target.free_casts or value.constant is not None:
            return 0.0
        if src.operands_only:
            return 0.0  # an op's own time has its results in fp32
        elements = math.prod(self._shape(value) or ())
        moved = elements * (src.storage_bytes + dst.storage_bytes)
        memory_s = moved / (self.target.bandwidth_gb_s * _GIGA)
        return self.target.cast_overhead_s + memory_s

    def _shape(self, value: Value) -> Shape | None:
        known = resolve_shape(value, self.shapes)
        if known is not None or value.shape is None:
            return known
        return tuple(
            d if isinstance(d, int) and d >= 0 else self.unknown_dim for d in value.shape
        )

    def node_shapes(self, graph: Graph, node: Node) -> dict[int, Shape]:
        """Shapes of the values around ``node``, observed, declared or assumed."""
        ids = (i for i in (*node.inputs, *node.outputs) if i is not None)
        shapes = ((i, self._shape(graph.values[i])) for i in ids)
        return {i: shape for i, shape in shapes if shape is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCost:
    """Times that an engine's profile gave, one run per format; casts by bytes and bandwidth.

    An op that a profile does not name was fused into another or optimised away: it costs
    nothing itself. A format without a profile of its own costs infinity. A value of
    unknown shape is cast as one element: give the observed shapes.

    Attributes:
        times_s: For each profiled format, seconds by node name.
        shapes: Observed shapes by value id; they win over the values' own.
        cast_overhead_s: Fixed cost of a cast.
        cast_bandwidth_gb_s: Rate of a cast's reading and writing, 1e9 bytes a second.
    """

    times_s: Mapping[Format, Mapping[str, float]]
    shapes: Shapes = field(default_factory=dict[int, Shape])
    cast_overhead_s: float = MEASURED_CAST_OVERHEAD_S
    cast_bandwidth_gb_s: float = MEASURED_CAST_BANDWIDTH_GB_S

    def node_time_s(self, graph: Graph, node: Node, fmt: Format) -> float:
        """Seconds as profiled; zero if fused away, infinity if ``fmt`` was not profiled."""
        del graph  # the profile knows nodes by name alone
        profile = self.times_s.get(fmt)
        return math.inf if profile is None else profile.get(node.name, 0.0)

    def cast_time_s(self, value: Value, src: Format, dst: Format) -> float:
        """Overhead plus bytes over bandwidth; constants are converted ahead of time.

        An op on codes was profiled where it gives codes. If one reader takes fp32, it stores
        that, which is more bytes; where others take codes they are made by a kernel more.
        """
        if src.storage is dst.storage or value.constant is not None:
            return 0.0
        elements = math.prod(resolve_shape(value, self.shapes) or ())
        if src.scaled:
            if len(value.uses) + value.is_output > 1:
                return self.cast_time_s(value, Format.FP32, src)
            more = elements * (dst.storage_bytes - src.storage_bytes)
            return more / (self.cast_bandwidth_gb_s * _GIGA)
        moved = elements * (src.storage_bytes + dst.storage_bytes)
        return self.cast_overhead_s + moved / (self.cast_bandwidth_gb_s * _GIGA)
