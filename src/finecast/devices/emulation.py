"""How a target computes: which ports of which op round, to what, and how.

Laws: matmul operands round at the engine's input and sums stay in fp32; a cast op stores its
result in the format it was cast to, but in scope ``matmult`` the fp32 sum is the result;
vector ops compute in fp32 inside and round at their ports; an op that only moves numbers
rounds nothing that is already rounded; a transpose on the matmul engine rounds, a byte move
does not. Emulating fp32 on a device that computes in fp32 changes nothing. An engine that
takes subnormals of a format as zero does so with operands in it and with sums of them; a sum
kept in less than fp32 ends representable there (what its partial sums lose is not modelled:
it depends on their order, which no device documents).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NoReturn

from finecast.calls import checks
from finecast.devices.targets import (
    EngineRole,
    Relayout,
    Target,
    list_targets,
    load_target,
)
from finecast.errors import UsageError
from finecast.graph import Graph, Node
from finecast.naming import share_of
from finecast.numbers.encodings import Dynamic, Encodings, Stored
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder, Rounding
from finecast.numbers.summation import Order
from finecast.ops import OpKind, Tier, by_name
from finecast.ops.patterns import (
    activation_kernels,
    affine_kernels,
    bias_kernels,
    merged,
    norm_kernels,
)
from finecast.rules.policy import Policy, Scope

TF32_NOTE: Final = (
    "ONNX has no tf32: fp32 arithmetic in the model rounds the operands, and gives wrong"
    " numbers where something casts it lower (compile with --auto-cast none, run OpenVINO with"
    " hint f32); for tf32's speed give the original model to the compiler with"
    " --auto-cast-type tf32, or to a runtime with its tf32 on"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedPorts:
    """Formats to which an op's inputs and results are rounded when it is cast."""

    read: Format
    write: Format


@checks
@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """A target and the options of its compiler that touch numbers.

    Attributes:
        scope: Which ops are cast: ``none``, ``matmult`` or ``all``.
        format: The format that they are cast to.
        relayout: The format of transposes on the matmul engine; None where bytes are moved.
        saturate_infinity: Transposes on the matmul engine take Inf as the largest number;
            without this the zeros of the identity turn it into NaN.
        mixed_accumulation: Softmax, norms and the like compute in fp32 and round only their
            result; otherwise each of their steps rounds.
        rounds_normalized: Norms round before scale and shift too, as ONNX defines them for low
            types and OpenVINO runs them; PyTorch and accelerators'
            compilers round only the result.
        rounding: How casts round.
        standalone: How casts round that are kernels of their own: those of the model's inputs,
            and of norms before scale and shift. None for as ``rounding``.
        seed: Seed of stochastic rounding.
        encodings: If ``format`` has parameters, those of the inputs of each node that is cast,
            by its id; nodes that are not in it are not cast.
        order: The order in which products and sums add up; None for that of the engine's
            kernels here.
        share: The share of orders of summation on which a plan has to keep a criterion; 0 to
            try none, None for the default, where trying them takes little time.
    """

    target: Target
    scope: Scope = Scope.NONE
    format: Format = Format.BF16
    relayout: Format | None = None
    saturate_infinity: bool = False
    mixed_accumulation: bool = True
    rounds_normalized: bool = False
    rounding: Rounding = Rounding.NEAREST_EVEN
    standalone: Rounding | None = None
    seed: int = 0
    encodings: Mapping[int, Encodings] = field(
        default_factory=dict[int, Encodings], hash=False
    )
    order: Order | None = None
    share: float | None = None

    def conversion(
        self,
        fmt: Format,
        encoding: Stored | Dynamic | None = None,
        *,
        standalone: bool = False,
        flush: bool = False,
    ) -> Rounder:
        """How values are converted to ``fmt`` here; with ``flush`` subnormals become zero."""
        alone = self.standalone if standalone else None
        return Rounder(
            format=fmt,
            rounding=alone or self.rounding,
            saturate=fmt.bits == 8 and self.target.saturating_fp8,
            flush_subnormals=flush,
            seed=self.seed,
            encoding=encoding,
        )

    @property
    def signed_codes(self) -> bool:
        """Whether products on integers take signed codes without zero points alone."""
        return self.target.engine(EngineRole.MATMUL).signed_codes

    def in_scope(self, node: Node) -> bool:
        """Whether the options cast ``node``."""
        info = by_name(node.op)
        if node.format is not Format.FP32 or info.tier is Tier.NEVER:
            return False
        if self.scope is Scope.MATMULT:
            return info.matmul_engine
        return self.scope is not Scope.NONE

    def ports(self, node: Node) -> EmulatedPorts | None:
        """The formats that a cast of ``node`` rounds to; None if the target cannot cast it."""
        real = self.target.engine_for(by_name(node.op).kind).computes_in(self.format)
        if real is None or node.format is not Format.FP32:
            return None
        if self.format.has_scales:
            coded = node.id in self.encodings and (
                real is self.format or not self.format.runs_on_codes
            )
            return EmulatedPorts(read=self.format, write=self.format.result) if coded else None
        # An engine that computes in a wider format still reads operands rounded by the cast.
        narrow = min(self.format, real, key=lambda f: (f.mantissa_bits, f.max))
        stored = self.format.storage is not Format.FP32 or narrow is not Format.FP32
        return EmulatedPorts(read=narrow, write=narrow if stored else Format.FP32)

    def held(self, fmt: Format) -> Format:
        """The target's own variant of ``fmt``: its e4m3 may end at 240."""
        real = self.target.engine_for(OpKind.MATMUL).computes_in(fmt)
        if real is None or real.bits != fmt.bits:
            return fmt
        return min(fmt, real, key=lambda f: (f.mantissa_bits, f.max))

    def flushes(self, node: Node, fmt: Format) -> bool:
        """Whether ``node``, computing in ``fmt``, takes its subnormals as zero."""
        return fmt in self.target.engine_for(by_name(node.op).kind).flushes_subnormals

    def sums_in(self, node: Node, fmt: Format) -> Format:
        """The format in which ``node`` adds up ``fmt`` numbers; fp32 if it sums nothing."""
        info = by_name(node.op)
        if not info.matmul_engine:
            return Format.FP32  # vector engines compute in fp32 inside
        return self.target.engine_for(info.kind).accumulation_of(fmt)

    def block_of(self, node: Node, fmt: Format) -> int:
        """The terms that one instruction of ``node`` adds up in ``fmt``; 0 if not known."""
        engine = self.target.engine_for(by_name(node.op).kind)
        return engine.blocks.get(engine.computes_in(fmt) or fmt, 0)

    def own_read(self, node: Node) -> Format:
        """The format to which the inputs of an fp32 op are rounded even if it is not cast.

        On inf1, which has no fp32 products, it is bf16.
        """
        engine = self.target.engine_for(by_name(node.op).kind)
        return engine.computes_in(Format.FP32) or Format.FP32


def check(emulation: Emulation) -> None:
    """Check that the target can do what ``emulation`` asks for.

    Raises:
        UsageError: If its matmul engine lacks the format, or it has no such option.
    """
    target, fmt = emulation.target, emulation.format
    if emulation.scope is not Scope.NONE:
        engine = target.engine_for(OpKind.MATMUL)
        if engine.computes_in(fmt) is None:
            stated = {**engine.rates_tflops, **engine.runs_as}
            low = (f for f in stated if f is not Format.FP32 and engine.computes_in(f))
            known = ", ".join(f.label for f in low)
            lacks = (
                "no such arithmetic"
                if fmt.reads is fmt or fmt.multiplies_codes
                else "no kernels known that widen weights as they read them"
            )
            raise UsageError(
                f"--auto-cast-type {fmt.label} with --target {target.name}: the device has"
                f" {lacks}",
                fix=f"use one of {known}",
            )
    if emulation.rounding is Rounding.STOCHASTIC and not target.stochastic_rounding:
        raise UsageError(
            f"stochastic rounding with --target {target.name}: the device has none",
            fix="drop it, or choose trn1, inf2, trn2 or trn3",
        )


def with_share(text: str) -> tuple[str, float | None]:
    """The device and the share of orders in ``DEVICE[:SHARE]``; None for no share.

    Raises:
        UsageError: If what follows the colon is no share.
    """
    name, colon, share = text.partition(":")
    asked = share_of(share, where="--target", example=0.9, most=1.0) if colon else None
    return name, asked


def refuse_share(target: str) -> NoReturn:
    """Raise UsageError for a share of orders where none are tried."""
    name, _, share = target.partition(":")
    raise UsageError(
        f"no orders of summation are tried here, of which a share could be {share!r}",
        where=f"--target {target}",
        fix=f"give --target {name}; emulate and tune take a share",
    )


def explicit_casts(name: str) -> Emulation:
    """The target ``name`` as it runs a model of explicit casts: its compiler casts nothing.

    ``name`` may have a share of orders, as in ``with_share``.

    A transpose by product is exact in fp32, but for Inf. Where products of fp32 run in another
    format, the compiler moves bytes.

    Raises:
        UsageError: If there is no such target.
    """
    name, share = with_share(name)
    target = load_target(name)
    exact = target.engine(EngineRole.MATMUL).computes_in(Format.FP32) is Format.FP32
    by_product = exact and Relayout.MATMUL in target.relayouts
    relayout = Format.FP32 if by_product else None
    return Emulation(target=target, relayout=relayout, share=share)


def check_formats(emulation: Emulation, policy: Policy) -> None:
    """Check that the device computes in every format that ``policy`` lowers ops to.

    Raises:
        UsageError: If it does not; lists the formats that it has, or for tf32 the devices.
    """
    if policy.scope is Scope.NONE:
        return
    target = emulation.target
    for fmt in policy.formats:
        if fmt is Format.TF32 and not target.computes_in(fmt):
            raise UsageError(
                f"--auto-cast-type tf32 with --target {target.name}: the device has no such"
                " arithmetic",
                fix=f"drop the type, or name one of {', '.join(having(fmt))}",
            )
        check(replace(emulation, format=fmt, scope=Scope.ALL))


def having(fmt: Format) -> list[str]:
    """Names of the targets whose products are computed in ``fmt``."""
    return [name for name in list_targets() if load_target(name).computes_in(fmt)]


def is_relayout(node: Node) -> bool:
    """Whether ``node`` reorders numbers as a product with a permutation matrix could."""
    return by_name(node.op).kind is OpKind.RELAYOUT


# Index of the input that is added to the sum of a product, by op.
_ADDENDS: Final = {
    "gemm": 2,
    "fused_gemm": 2,
    "linear": 2,
    "addmm": 0,
    "conv": 2,
    "fused_conv": 2,
    "nhwc_conv": 2,
    "conv_transpose": 2,
}


def is_parameter(node: Node, index: int) -> bool:
    """Whether input ``index`` is a bias, or a norm's scale or shift, and not an operand.

    Compilers that cast the operands of products leave it, so that a graph in which the bias is
    a node of its own computes the same.
    """
    kind = by_name(node.op).kind
    return _ADDENDS.get(node.op) == index or (kind is OpKind.NORM and index > 0)


def cast_nodes(graph: Graph, emulation: Emulation) -> frozenset[int]:
    """Ids of the nodes that the options cast."""
    return frozenset(
        n.id
        for n in graph.float_nodes
        if emulation.in_scope(n) and emulation.ports(n) is not None
    )


# Settings of the emulator: which nodes are cast, by a compiler's options or by a plan.


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
    """The setting of a plan: its low ops read and store low, each in its own format.

    In formats for operands alone (8-bit, tf32) ops store fp32.

    ``fp32_parameters`` are nodes whose scale and shift the plan's model keeps in fp32.
    """
    low = frozenset(i for i, f in formats.items() if f is not Format.FP32)
    return Setting(
        reads=low,
        parameters=low - fp32_parameters,
        writes=frozenset(i for i in low if formats[i].encodes_results),
        relayout=emulation.relayout is not None,
    )
