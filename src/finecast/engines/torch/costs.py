"""Cost model of ops and casts in a compiled PyTorch graph.

Matrix products and convolutions are kernels of their own: their time is measured, or else the
longer of the times by arithmetic rate and by memory bandwidth. All other ops are fused, so
only the bytes that they move cost time, and a fused cast costs only writing its copy. Views
cost nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from finecast.engines.torch.kernels import KernelTimes
from finecast.engines.torch.rates import Rate
from finecast.frontends.torch.aten import VIEWS
from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.ops.flops import Shape, Shapes, bytes_moved, flops, port_formats, resolve_shape

# About half of the values in fused kernels stay in registers and are not written to memory.
_FUSED_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCost:
    """A cost model of compiled code on a device whose rates were measured.

    Attributes:
        graph: The graph that values belong to.
        rates: Measured rates by format.
        shapes: Observed shapes by value id.
        kernels: Measured times of single kernels, where they can be run.
    """

    graph: Graph
    rates: dict[Format, Rate]
    shapes: Shapes = field(default_factory=dict[int, Shape])
    kernels: KernelTimes | None = None

    def node_time_s(self, graph: Graph, node: Node, fmt: Format) -> float:
        """Seconds that ``node`` takes in ``fmt``; infinity if the format was not measured."""
        rate = self.rates.get(fmt)
        if rate is None:
            return math.inf
        if node.native in VIEWS:
            return 0.0
        moved = bytes_moved(graph, node, port_formats(graph, node, fmt), self.shapes) or 0.0
        memory_s = moved / rate.bandwidth_gb_s / 1e9
        if not by_name(node.op).matmul_engine:
            return _FUSED_SHARE * memory_s
        compute_s = (flops(graph, node, self.shapes) or 0.0) / rate.product_tflops / 1e12
        modelled_s = max(compute_s, memory_s) + rate.overhead_s
        if self.kernels is None:
            return modelled_s
        measured_s = self.kernels.time_s(node, fmt, modelled_s)
        return modelled_s if measured_s is None else measured_s

    def cast_time_s(self, value: Value, src: Format, dst: Format) -> float:
        """Seconds to convert ``value``; less if the cast is fused with an op next to it."""
        if src.storage is dst.storage or not src.encodes_results or value.constant is not None:
            return 0.0
        rate = self.rates[Format.FP32]
        elements = math.prod(resolve_shape(value, self.shapes) or ())
        written = dst.bytes_for(elements)
        if self._fuses(value):
            return _FUSED_SHARE * written / rate.bandwidth_gb_s / 1e9
        moved = src.bytes_for(elements) + written
        return rate.overhead_s + moved / rate.bandwidth_gb_s / 1e9

    def _fuses(self, value: Value) -> bool:
        """Whether the producer of ``value``, or all its readers, are ops that are fused."""
        around = [value.producer] if value.producer is not None else []
        own = any(not self._kernel(i) for i in around)
        return own or (bool(value.uses) and all(not self._kernel(i) for i in value.uses))

    def _kernel(self, node_id: int) -> bool:
        return by_name(self.graph.nodes[node_id].op).matmul_engine
