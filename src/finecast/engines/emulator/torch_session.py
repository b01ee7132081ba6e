"""A PyTorch program run as a device would: every value rounded as its readers see it.

The program is interpreted node by node in fp32; in between values are rounded as
``roundings`` says. So a setting is changed without a rebuild, and weights are rounded once
for each setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from torch.fx import Node as FxNode
from torch.fx.node import map_arg

from finecast.devices.emulation import Emulation, Setting, device_kernels, kernel_numbers
from finecast.engines.base import Array, EmulatedSession, Feeds
from finecast.engines.emulator.roundings import (
    GraphRoundings,
    RoundedViews,
    Roundings,
    RoundTo,
)
from finecast.engines.emulator.torch_program import PreparedProgram, ProgramRun
from finecast.engines.torch.session import output_array
from finecast.frontends.torch.aten import is_number, named_arguments, scalar_names
from finecast.frontends.torch.reader import tensor_inputs, value_ids
from finecast.graph import SCALARS, Node, Value
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder, Rounding, convert

Ports = Mapping[tuple[FxNode, int], tuple[Value, Roundings]]


@final
class TorchEmulatorSession(EmulatedSession):
    """A session that runs a prepared program under a setting, which ``apply`` changes.

    Args:
        prepared: The program.
        emulation: The target and its options.
        setting: What is cast.
        formats: Formats, by node id, of nodes cast to another one than ``emulation.format``.
    """

    def __init__(
        self,
        prepared: PreparedProgram,
        emulation: Emulation,
        setting: Setting,
        *,
        formats: Mapping[int, Format] | None = None,
    ) -> None:
        kernels = device_kernels(prepared.graph, emulation)
        roundings = GraphRoundings(
            graph=prepared.graph,
            emulation=emulation,
            kernel_of=kernel_numbers(kernels),
            formats=formats or {},
        )
        self._rounded = _RoundedProgram(
            prepared=prepared, roundings=roundings, ports=_ports(prepared, roundings)
        )
        self.inputs = prepared.signature.inputs
        self.outputs = [s for s in prepared.signature.outputs if s is not None]
        self._setting = setting
        self._weights: dict[tuple[int, tuple[RoundTo, ...]], torch.Tensor] = {}
        self._seen = 0

    def apply(self, setting: Setting) -> TorchEmulatorSession:
        """Cast what ``setting`` says from now on; the stream of samples starts anew."""
        self._setting = setting
        self._weights.clear()
        return self.restart()

    def restart(self) -> TorchEmulatorSession:
        """The next sample is the first of the stream."""
        self._seen = 0
        return self

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run one batch as the target would."""
        one = _Run(self._rounded, self._setting, self._weights, self._seen)
        leaves = one.run_feeds(feeds)
        self._seen += max((len(a) for a in feeds.values() if a.ndim), default=1)
        signature = self._rounded.prepared.signature
        return {
            spec.name: output_array(leaf)
            for spec, leaf in zip(signature.outputs, leaves, strict=True)
            if spec is not None
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundedProgram:
    """A program and its roundings under every setting."""

    prepared: PreparedProgram
    roundings: GraphRoundings
    ports: Ports


def _ports(prepared: PreparedProgram, roundings: GraphRoundings) -> Ports:
    """Values and roundings of the arguments that are rounded, by node and position."""
    graph, binding = prepared.graph, prepared.binding
    ids = value_ids(binding)
    number = {fx: n for n, fx in enumerate(binding.nodes)}
    of = {v.id: roundings.value(v) for v in graph.values if v.constant is None}
    found: dict[tuple[FxNode, int], tuple[Value, Roundings]] = {}
    for fx in prepared.module.graph.nodes:
        reader = graph.nodes[number[fx]] if fx in number else None
        if reader is None and fx.op != "output":
            continue
        for index, source in enumerate(tensor_inputs(fx)):
            value_id = ids.get(source)
            if value_id is None or graph.values[value_id].format is not Format.FP32:
                continue
            value = graph.values[value_id]
            if value.constant is None:
                port = (-1 if reader is None else reader.id, index)
                wanted = of[value_id].ports.get(port, of[value_id].stored)
            else:
                wanted = {} if reader is None else roundings.constant(reader, index)
            if wanted:
                found[fx, index] = value, wanted
    return found


class _Run(ProgramRun):
    """One batch, whose first sample is number ``seen`` of the stream."""

    def __init__(
        self,
        rounded: _RoundedProgram,
        setting: Setting,
        weights: dict[tuple[int, tuple[RoundTo, ...]], torch.Tensor],
        seen: int,
    ) -> None:
        super().__init__(rounded.prepared)
        self.rounded = rounded
        self.setting = setting
        self.weights = weights
        self.seen = seen
        self.views: dict[int, RoundedViews[torch.Tensor]] = {}
        graph, binding = rounded.prepared.graph, rounded.prepared.binding
        self.nodes = {fx: graph.nodes[n] for n, fx in enumerate(binding.nodes)}
        self.ids = value_ids(binding)

    def run_node(self, n: FxNode) -> Any:
        """Run one node on its rounded arguments."""
        node = self.nodes.get(n)
        if node is None and n.op != "output":
            return super().run_node(n)
        port = -1

        def load(arg: FxNode) -> Any:
            nonlocal port
            port += 1
            return self._seen_by(n, port, self.env[arg])

        args, kwargs = map_arg((n.args, n.kwargs), load)
        if node is None:
            result: Any = args[0]
        else:
            args, kwargs = self._operands(n, node, args, kwargs)
            result = self.call_function(n.target, args, kwargs)  # type: ignore[arg-type]
        for done in self.user_to_last_uses.get(n, ()):
            self.views.pop(self.ids.get(done, -1), None)
        return result

    def _seen_by(self, n: FxNode, port: int, tensor: Any) -> Any:
        found = self.rounded.ports.get((n, port))
        if found is None:
            return tensor
        value, roundings = found
        if value.constant is not None:
            return self._weight(value, roundings, tensor)
        if value.id not in self.views:
            self.views[value.id] = self._view(value, tensor)
        return self.views[value.id].of(roundings)

    def _view(self, value: Value, tensor: torch.Tensor) -> RoundedViews[torch.Tensor]:
        made = 0

        def rounding(base: torch.Tensor, into: RoundTo) -> torch.Tensor:
            nonlocal made
            made += 1
            rows = base.shape[0] if base.dim() else 1
            return convert_tensor(
                base,
                self.rounded.roundings.conversion(value, into),
                offset=self.seen * (base.numel() // max(rows, 1)),
                stream=(value.id << _ROUNDINGS_BITS) + made,
            )

        return RoundedViews(native=tensor, rounding=rounding, fixed=self.setting)

    def _weight(
        self, value: Value, roundings: Roundings, tensor: torch.Tensor
    ) -> torch.Tensor:
        """A constant, rounded once for all runs under the setting."""
        active = tuple(into for into, bits in roundings.items() if self.setting.on(bits))
        if not active:
            return tensor
        key = value.id, active
        if key not in self.weights:
            # From the exact numbers: a cast comes last, and replaces the engine's rounding.
            how = self.rounded.roundings.conversion(value, active[-1])
            self.weights[key] = convert_tensor(tensor.detach(), how)
        return self.weights[key]

    def _operands(
        self, n: FxNode, node: Node, args: Any, kwargs: Any
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Arguments with numbers rounded, and Inf as a transpose by product leaves it."""
        if SCALARS in node.attributes:
            names = scalar_names(n.target)
            by_position = list(named_arguments(n))
            args = [
                self._scalar(node, a) if name in names else a
                for name, a in zip(by_position, args, strict=False)
            ]
            kwargs = {k: self._scalar(node, a) if k in names else a for k, a in kwargs.items()}
        if self.setting.relayout and self.rounded.roundings.spoils_infinities(node):
            args = [self._through_identity(args[0]), *args[1:]]
        return args, kwargs

    def _scalar(self, node: Node, number: Any) -> Any:
        if not is_number(number):
            return number
        exact = np.float32(number)
        for into, bits in self.rounded.roundings.scalars(node).items():
            if self.setting.on(bits):
                how = self.rounded.roundings.emulation.conversion(
                    into.format, flush=into.flush
                )
                rounded = float(convert(np.asarray(exact), how))
                number = number if rounded == float(exact) else rounded
        return number

    def _through_identity(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with vectors that have Inf turned to NaN, or with Inf clamped."""
        emulation = self.rounded.roundings.emulation
        if not emulation.saturate_infinity:
            return x + (x * 0.0).sum(-1, keepdim=True)
        top = emulation.format.max
        return torch.where(x.isinf(), x.clamp(-top, top), x)


# Bits of a stream's number for the rounding of a value: no value has 2^16 of them.
_ROUNDINGS_BITS = 16


# Types whose conversions round to nearest even and overflow to infinity. Torch's fp8 types are
# not those of accelerators, and whether they saturate depends on the processor.
_CASTS: Final = {Format.BF16: torch.bfloat16, Format.FP16: torch.float16}


def convert_tensor(
    x: torch.Tensor, how: Rounder, *, offset: int = 0, stream: int = 0
) -> torch.Tensor:
    """Convert an fp32 tensor; the results are fp32, in the same shape.

    Law: that is ``roundmodes.convert``, bit for bit; by torch where its conversions are exact.
    """
    plain = how.rounding is Rounding.NEAREST_EVEN and not how.saturate and how.encoding is None
    if plain and how.format in (*_CASTS, Format.TF32, Format.FP32):
        out = _nearest(x, how.format)
        return _flushed(out, how.format) if how.flush_subnormals else out
    array = x.detach().cpu().numpy()
    rounded = np.asarray(convert(array, how, offset=offset, stream=stream))
    return torch.from_numpy(rounded.reshape(array.shape)).to(x.device)


def _nearest(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    if fmt is Format.FP32:
        return x
    if fmt in _CASTS:
        return x.to(_CASTS[fmt]).to(torch.float32)
    drop = Format.FP32.mantissa_bits - fmt.mantissa_bits
    bits = x.view(torch.int32)
    odd = (bits >> drop) & 1
    rounded = (bits + (1 << (drop - 1)) - 1 + odd) & -(1 << drop)
    return torch.where(torch.isfinite(x), rounded.view(torch.float32), x)


def _flushed(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    zero = torch.copysign(torch.zeros_like(x), x)
    return torch.where(x.abs() < fmt.smallest_normal, zero, x)
