"""Settings of the emulator: which nodes are cast, by a compiler's options or by a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from finecast.devices.emulation import Emulation, cast_nodes
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.ops.patterns import (
    activation_kernels,
    affine_kernels,
    bias_kernels,
    merged,
    norm_kernels,
)
from finecast.rules.policy import Scope

# What a setting switches: operands, parameters or result of a node (kind and node id), or all
# transposes at once (``RELAYOUT``). ``ALWAYS`` is on in every setting.
Bit = tuple[str, int]
READ: Final = "read"
PARAMETER: Final = "parameter"
WRITE: Final = "write"
RELAYOUT: Final[Bit] = ("relayout", 0)
ALWAYS: Final[Bit] = ("always", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Which nodes are cast, by id.

    Attributes:
        reads: Nodes whose operands are cast.
        parameters: Nodes whose bias, scale and shift are cast as well.
        writes: Nodes that store low results.
        relayout: Whether transposes run on the matmul engine.
    """

    reads: frozenset[int] = frozenset()
    parameters: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    relayout: bool = False

    def on(self, bits: frozenset[Bit]) -> bool:
        """Whether any of ``bits`` is on."""
        sets = {READ: self.reads, PARAMETER: self.parameters, WRITE: self.writes}
        return any(
            kind == ALWAYS[0] or (self.relayout if kind == RELAYOUT[0] else i in sets[kind])
            for kind, i in bits
        )

    def only(self, nodes: frozenset[int]) -> Setting:
        """This setting restricted to ``nodes``, without the relayout."""
        return Setting(
            reads=self.reads & nodes,
            parameters=self.parameters & nodes,
            writes=self.writes & nodes,
        )


def device_kernels(graph: Graph, emulation: Emulation) -> list[frozenset[int]]:
    """Groups of nodes, by id, that the device runs as one kernel: no rounding inside."""
    kernels = bias_kernels(graph) + activation_kernels(graph) + affine_kernels(graph)
    if emulation.mixed_accumulation:
        kernels += norm_kernels(graph)
    return merged(kernels)


def kernel_numbers(kernels: Sequence[frozenset[int]]) -> dict[int, int]:
    """The number of its kernel for each node, by id, that runs together with others."""
    return {n: k for k, nodes in enumerate(kernels) for n in nodes}


def setting_of(graph: Graph, emulation: Emulation) -> Setting:
    """The setting that the options of ``emulation`` stand for."""
    cast = cast_nodes(graph, emulation)
    everything = emulation.scope is Scope.ALL
    return Setting(
        reads=cast,
        # A compiler that casts only products casts their operands, but not the bias.
        parameters=cast if everything else frozenset(),
        # In scope ``matmult`` the sums of products stay in fp32.
        writes=cast if everything else frozenset(),
        relayout=emulation.relayout is not None,
    )


def setting_of_plan(
    formats: Mapping[int, Format],
    emulation: Emulation,
    *,
    fp32_parameters: frozenset[int] = frozenset(),
) -> Setting:
    """The setting of a plan of one low format: its low ops read and store low.

    In formats for operands alone (8-bit, tf32) ops store fp32.

    Args:
        formats: Format by node id.
        emulation: The target; its format is the plan's low one.
        fp32_parameters: Nodes whose scale and shift the plan's model keeps in fp32.
    """
    low = frozenset(i for i, f in formats.items() if f is emulation.format)
    writes = low if emulation.format.encodes_results else frozenset[int]()
    return Setting(
        reads=low,
        parameters=low - fp32_parameters,
        writes=writes,
        relayout=emulation.relayout is not None,
    )


def setting_of_formats(
    formats: Mapping[int, Format],
    emulation: Emulation,
    *,
    fp32_parameters: frozenset[int] = frozenset(),
) -> Setting:
    """The setting of a plan of any number of low formats, each op in its own.

    Args:
        formats: Format by node id.
        emulation: The target.
        fp32_parameters: Nodes whose scale and shift the plan's model keeps in fp32.
    """
    low = {i: f for i, f in formats.items() if f is not Format.FP32}
    found = Setting(relayout=emulation.relayout is not None)
    for fmt in set(low.values()):
        one = setting_of_plan(
            low, replace(emulation, format=fmt), fp32_parameters=fp32_parameters
        )
        found = replace(
            found,
            reads=found.reads | one.reads,
            parameters=found.parameters | one.parameters,
            writes=found.writes | one.writes,
        )
    return found
