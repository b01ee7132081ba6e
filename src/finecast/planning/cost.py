"""The time of a node in a format, and of a cast: modelled or measured.

Law: times are seconds, never negative, and depend on nothing but the arguments. A format that
the engine cannot run a node in costs infinity.
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

# Measured in OpenVINO on a 2-core AVX512-BF16 CPU: a cast that is not fused into another op
# takes 12 us, and moves its bytes (fp32 to bf16: 6 per element) at 10 GB/s.
MEASURED_CAST_OVERHEAD_S = 12e-6
MEASURED_CAST_BANDWIDTH_GB_S = 10.0

_GIGA = 1e9
_TERA = 1e12


class CostModel(Protocol):
    """The times that a plan's formats and casts take."""

    @property
    def shapes(self) -> Shapes:
        """Observed shapes of values, by id."""
        ...

    def stored(self, fmt: Format) -> Format:
        """The format in which numbers of ``fmt`` rest in memory while a model runs."""
        ...

    def node_time_s(self, graph: Graph, node: Node, fmt: Format) -> float:
        """Seconds that ``node`` takes if it computes in ``fmt``; casts are not included."""
        ...

    def cast_time_s(self, value: Value, src: Format, dst: Format) -> float:
        """Seconds to convert ``value``; zero where both formats have the same storage type.

        If ``src`` is a format for operands only, the additional time that an op computing in
        it takes to store its result in ``dst``.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost:
    """max(operations / rate, bytes / bandwidth) + overhead, on a target.

    Each unknown dimension counts as 1, so that ops can still be compared; a value of unknown
    rank counts as one element.

    Attributes:
        shapes: Observed shapes by value id; they take precedence over the graph's.
    """

    target: Target
    shapes: Shapes = field(default_factory=dict[int, Shape])

    def stored(self, fmt: Format) -> Format:
        """FP32 for formats that the target's engines widen as they load a model."""
        return self.target.stored(fmt)

    def node_time_s(self, graph: Graph, node: Node, fmt: Format) -> float:
        """Seconds by the roofline; infinity if the engine has no such format.

        Formats of products, such as blocks, are often none of the other engines': an addition
        in the kernel of a product computes in the format of the product's result.
        """
        info = by_name(node.op)
        engine = self.target.engine_for(info.kind)
        if engine.computes_in(fmt) is None and not info.matmul_engine:
            fmt = fmt.result
        rate = engine.rate_tflops(fmt)
        if rate is None:
            return math.inf
        return self.kernel_time_s(graph, node, rate, port_formats(graph, node, fmt))

    def kernel_time_s(
        self,
        graph: Graph,
        node: Node,
        rate_tflops: float,
        stored: Mapping[int, Format],
        traffic: float = 1.0,
    ) -> float:
        """Seconds of ``node`` at a rate; zero for a view, which has no kernel.

        ``stored`` are the formats of the values that it reads and writes, by id, where those
        are not the graph's own. Their bytes move ``traffic`` times.
        """
        shapes = self.node_shapes(graph, node)
        stored = {i: self.stored(fmt) for i, fmt in stored.items()}
        compute_s = (flops(graph, node, shapes) or 0.0) / (rate_tflops * _TERA)
        moved = bytes_moved(graph, node, stored, shapes)
        if moved == 0.0 and compute_s == 0.0:
            return 0.0
        memory_s = traffic * (moved or 0.0) / (self.target.bandwidth_gb_s * _GIGA)
        return max(compute_s, memory_s) + self.target.op_overhead_s

    def cast_time_s(self, value: Value, src: Format, dst: Format) -> float:
        """Seconds to read in one format and write in the other; zero where casts are free."""
        src, dst = self.stored(src), self.stored(dst)
        if src.storage is dst.storage or self.target.free_casts or value.constant is not None:
            return 0.0
        if not src.encodes_results:
            return 0.0  # the op stores its result in fp32; its own time includes that
        elements = math.prod(self._shape(value) or ())
        moved = src.bytes_for(elements) + dst.bytes_for(elements)
        memory_s = moved / (self.target.bandwidth_gb_s * _GIGA)
        return self.target.cast_overhead_s + memory_s

    def _shape(self, value: Value) -> Shape | None:
        known = resolve_shape(value, self.shapes)
        if known is not None or value.shape is None:
            return known
        return tuple(d if isinstance(d, int) and d >= 0 else 1 for d in value.shape)

    def node_shapes(self, graph: Graph, node: Node) -> dict[int, Shape]:
        """Shapes of the values around ``node``, observed, declared or assumed."""
        ids = (*node.input_ids, *node.output_ids)
        shapes = ((i, self._shape(graph.values[i])) for i in ids)
        return {i: shape for i, shape in shapes if shape is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCost:
    """Times from an engine's profiles, one per format; casts by bytes and bandwidth.

    An op that a profile does not name was fused into another or optimised away: its time is
    zero. A format without a profile costs infinity. A value of unknown shape is priced as one
    element, so give the observed shapes.

    Attributes:
        times_s: For each profiled format, seconds by node name.
        shapes: Observed shapes by value id; they take precedence over the values' own.
        cast_overhead_s: Fixed cost of a cast.
        cast_bandwidth_gb_s: Rate of a cast's reading and writing, 1e9 bytes a second.
        widened: Formats that the engine turns into fp32 as it loads a model.
    """

    times_s: Mapping[Format, Mapping[str, float]]
    shapes: Shapes = field(default_factory=dict[int, Shape])
    cast_overhead_s: float = MEASURED_CAST_OVERHEAD_S
    cast_bandwidth_gb_s: float = MEASURED_CAST_BANDWIDTH_GB_S
    widened: frozenset[Format] = frozenset()

    def stored(self, fmt: Format) -> Format:
        """FP32 for formats that the engine widens."""
        return Format.FP32 if fmt in self.widened else fmt

    def node_time_s(self, graph: Graph, node: Node, fmt: Format) -> float:
        """Seconds as profiled; zero if fused away, infinity if ``fmt`` was not profiled."""
        del graph  # the profile knows nodes by name alone
        profile = self.times_s.get(fmt)
        return math.inf if profile is None else profile.get(node.name, 0.0)

    def cast_time_s(self, value: Value, src: Format, dst: Format) -> float:
        """Overhead plus bytes over bandwidth; constants are converted ahead of time.

        From a scaled format: the op was profiled storing integer codes. If its only reader
        takes fp32, it stores that instead, and the additional bytes count. If it has several
        readers, another kernel makes the codes for the rest: a cast from fp32.
        """
        if src.storage is dst.storage or value.constant is not None:
            return 0.0
        elements = math.prod(resolve_shape(value, self.shapes) or ())
        if src.runs_on_codes:
            if len(value.uses) + value.is_output > 1:
                return self.cast_time_s(value, Format.FP32, src)
            more = dst.bytes_for(elements) - src.bytes_for(elements)
            return more / (self.cast_bandwidth_gb_s * _GIGA)
        moved = src.bytes_for(elements) + dst.bytes_for(elements)
        return self.cast_overhead_s + moved / (self.cast_bandwidth_gb_s * _GIGA)
