"""Cost model of ops and casts in a compiled PyTorch graph.

Matrix products and convolutions are kernels of their own: their time is measured, or else the
longer of the times by arithmetic rate and by memory bandwidth. All other ops are fused, so
only the bytes that they move cost time, and a fused cast costs only writing its copy. Views
cost nothing.

Convolutions, products of activations and attention are calls of library kernels, whose speed
in a format depends on the shapes: on a CPU attention of one query over a long cache is several
times slower in bf16 than in fp32, while a dense convolution is twice as fast. So each
distinct one is run, once per process. Products with constant weights are not, and are priced
by ``rates``: when deployed they read packed weights, which a plain call does not. But if plans
may have integers, they are run with packed weights (``packed.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.fx import Node as FxNode
from torch.fx.node import map_arg
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage] - no public name
)

from finecast.engines.torch import rates
from finecast.engines.torch.rates import Rate, least_times, one_thread, rate_here
from finecast.frontends.torch.aten import DTYPES, VIEWS, named_arguments
from finecast.frontends.torch.codes import PRODUCTS_OF_VALUES, takes_codes
from finecast.frontends.torch.reader import FxBinding, hint, tensor_inputs
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

    @classmethod
    def of(
        cls,
        graph: Graph,
        formats: Sequence[Format],
        device: str,
        shapes: Mapping[int, Shape],
        binding: FxBinding | None = None,
    ) -> CompiledCost:
        """The model for these low formats; with ``binding`` single kernels are measured."""
        formats = (Format.FP32, *formats)
        kernels = None
        if binding is not None:
            threads = torch.get_num_threads() if device == "cpu" else 1
            kernels = KernelTimes(
                graph=graph, binding=binding, device=device, formats=formats, threads=threads
            )
        rates = {f: rate_here(device, f) for f in formats}
        return cls(graph=graph, rates=rates, shapes=shapes, kernels=kernels)

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
        if self.kernels is not None:
            measured_s = self.kernels.time_s(node, fmt, modelled_s)
            modelled_s = modelled_s if measured_s is None else measured_s
        return modelled_s + self._rounding_s(graph, node, fmt)

    def _rounding_s(self, graph: Graph, node: Node, fmt: Format) -> float:
        """Seconds to find scales and codes of the rows of a product, and to scale its result.

        Each row is read twice. The result is read and written again, by a kernel that may have
        other ops in it.
        """
        values, (result, *_) = _rounded(graph, node), [*graph.following_outputs(node), None]
        if fmt.dynamic_group is None or not values or result is None:
            return 0.0
        read = sum(math.prod(resolve_shape(v, self.shapes) or ()) for v in values)
        written = math.prod(resolve_shape(result, self.shapes) or ())
        moved = Format.FP32.bytes_for(2 * read) + fmt.bytes_for(read)
        moved += _FUSED_SHARE * Format.FP32.bytes_for(2 * written)
        rate = self.rates[Format.FP32]
        return rate.overhead_s + moved / rate.bandwidth_gb_s / 1e9

    def stored(self, fmt: Format) -> Format:
        """The same: PyTorch keeps tensors in their types."""
        return fmt

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


# Longer kernels are bound by arithmetic, so that ``rates`` predict them well; measuring those
# of a large model would take minutes.
_LONGEST_S: Final = 0.05
# Time for the runs of each call, after which they end once there were this many.
_BUDGET_S: Final = 0.02
_FEWEST: Final = 3
_PACKED: Final = frozenset({"linear", "addmm", "matmul"})

_seen: Final[dict[str, tuple[float, ...] | None]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """Times of the kernels of one graph, by node and format; measured when first needed.

    Attributes:
        graph: The graph.
        binding: Its FX nodes.
        device: The device that they run on.
        formats: The formats to measure, in turns.
        threads: Times are measured on one thread and divided by this number.
    """

    graph: Graph
    binding: FxBinding
    device: str
    formats: tuple[Format, ...]
    threads: int

    def time_s(self, node: Node, fmt: Format, expected_s: float) -> float | None:
        """Seconds of ``node`` in ``fmt``; None for nodes that are not measured.

        ``expected_s`` is the time by ``rates``, with all threads.
        """
        if not self._is_measured(node) or expected_s * self.threads > _LONGEST_S:
            return None
        formats = [f for f in self.formats if not f.multiplies_codes or _multiplies(node, f)]
        if fmt not in formats:
            return math.inf
        fx = self.binding.nodes[node.id]
        key = self._key(node, fx)
        if key not in _seen:
            _seen[key] = self._measure(node, fx, formats)
        times_s = _seen[key]
        return None if times_s is None else times_s[formats.index(fmt)] / self.threads

    @property
    def frozen(self) -> bool:
        """Whether weights are packed: on CPUs, if a format with integers is compared."""
        return self.device == "cpu" and any(f.multiplies_integers for f in self.formats)

    def _is_measured(self, node: Node) -> bool:
        if not by_name(node.op).matmul_engine:
            return False
        if not self._weighted(node) or node.op not in _PACKED:
            return True
        return self.frozen and takes_codes(node)

    def _weighted(self, node: Node) -> bool:
        """Whether ``node`` is a product by constant weights."""
        weights = [i for i in node.inputs[1:2] if i is not None]
        return any(self.graph.values[i].constant is not None for i in weights)

    def _key(self, node: Node, fx: FxNode) -> str:
        shapes = [(*_sizes(n), _strides(n), n.meta["val"].dtype) for n in tensor_inputs(fx)
                  if isinstance(n.meta.get("val"), torch.Tensor)]  # fmt: skip
        plain = map_arg((fx.args, fx.kwargs), lambda n: None)  # type: ignore[arg-type, return-value]
        return f"{self.device} {self.formats} {fx.target} {shapes} {plain} {node.follows_in}"

    def _measure(
        self, node: Node, fx: FxNode, formats: Sequence[Format]
    ) -> tuple[float, ...] | None:
        # A backend may ask while torch traces a graph, in a mode where tensors are fake.
        with _disable_current_modes(), one_thread(self.device), torch.no_grad():
            try:
                calls = [self._call(node, fx, fmt) for fmt in formats]
                return tuple(
                    least_times(calls, self.device, fewest=_FEWEST, budget_s=_BUDGET_S)
                )
            except (RuntimeError, NotImplementedError):
                return None  # a format has no kernel, which ``kernel_check`` finds

    def _call(self, node: Node, fx: FxNode, fmt: Format) -> rates.Call:
        if fmt.has_float_codes or (fmt.multiplies_integers and self.device != "cpu"):
            arguments = named_arguments(fx)
            if node.native in PRODUCTS_OF_VALUES:
                left, right = tensor_inputs(fx)[-2:]
                return rates.coded_linear(_sizes(left), _sizes(right)[1], fmt, self.device)
            columns = _sizes(arguments["weight"])[0]
            return rates.coded_linear(_sizes(arguments["input"]), columns, fmt, self.device)
        if self.frozen and takes_codes(node) and self._weighted(node):
            arguments = named_arguments(fx)
            values, weights = _sizes(arguments["input"]), _sizes(arguments["weight"])
            if node.op in _PACKED:
                bias = arguments.get("bias") is not None
                return rates.linear(values, weights[0], fmt, bias=bias)
            if fmt.multiplies_integers:
                return rates.coded_conv2d(values, weights, arguments)
        tensors: dict[FxNode, Any] = {}
        for source, follows in zip(tensor_inputs(fx), node.follows_in, strict=True):
            tensors.setdefault(
                source, self._made(node, source, DTYPES[fmt.storage] if follows else None)
            )
        args, kwargs = map_arg((fx.args, fx.kwargs), lambda n: tensors[n])
        target: Callable[..., object] = fx.target  # type: ignore[assignment]
        return rates.in_format(lambda: target(*args, **kwargs), fmt)

    def _made(self, node: Node, source: FxNode, dtype: torch.dtype | None) -> Any:
        val = source.meta["val"]
        if not isinstance(val, torch.Tensor):
            return hint(val)
        sizes, strides = _sizes(source), _strides(source)
        value = 0.5 if val.is_floating_point() else 0
        tensor = torch.full(sizes, value, dtype=dtype or val.dtype, device=self.device)
        if node.op.startswith("conv") and tensor.dim() == 4:
            # The layout that Inductor gives images for convolutions.
            return tensor.contiguous(memory_format=torch.channels_last)
        if 0 in strides:
            return tensor
        return tensor.new_empty_strided(sizes, strides).copy_(tensor)


def _rounded(graph: Graph, node: Node) -> list[Value]:
    """The values that a kernel on codes rounds as it reads them: constants are codes."""
    operands = [
        graph.read(node, index) for index in PRODUCTS_OF_VALUES.get(node.native, (0, 1))
    ]
    return [v for v in operands if v is not None and v.constant is None]


def _multiplies(node: Node, fmt: Format) -> bool:
    """Whether a module, or a training graph, can state ``node`` on the codes of ``fmt``."""
    trained = fmt.has_float_codes and node.native in PRODUCTS_OF_VALUES
    return trained or takes_codes(node, fmt)


def _sizes(source: FxNode) -> tuple[int, ...]:
    return tuple(hint(d) for d in source.meta["val"].shape)


def _strides(source: FxNode) -> tuple[int, ...]:
    return tuple(hint(d) for d in source.meta["val"].stride())
