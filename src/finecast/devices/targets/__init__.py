"""Descriptions of devices: one TOML file each, and the loader.

A rate is dense (no sparsity), for the unit that the file names: one core of an accelerator
or CPU, one whole GPU. Ratios between formats are what finecast relies on.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import Annotated, Final

import msgspec

from finecast.errors import UsageError
from finecast.files.saved import SavedPart, converted, reading
from finecast.naming import close_names, look_up, spelled
from finecast.numbers.formats import Format
from finecast.ops import OpKind


class EngineRole(Enum):
    """Parts of a device: matrix products; elementwise ops and reductions; exponentials."""

    MATMUL = "matmul"
    VECTOR = "vector"
    SCALAR = "scalar"


class Relayout(Enum):
    """How a device transposes."""

    MATMUL = "matmul"
    """By a product with the identity matrix: rounds to the engine's format."""
    BYTE_MOVE = "byte_move"
    """By copying bytes: exact."""


Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: what it computes in, how fast, and how it accumulates.

    Attributes:
        rates_tflops: Operations per second by format, in units of 1e12.
        runs_as: Formats that it accepts, and the format that it computes in instead: inf1's
            fp32 products run in bf16, a CPU's fp16 arithmetic in fp32.
        accumulates_in: Format of sums and of arithmetic between the ports.
        accumulation: Exceptions to ``accumulates_in``, by input format.
        flushes_subnormals: Formats whose arithmetic takes subnormal inputs as zero, and gives
            zero for subnormal results.
        blocks: By input format, the terms that one instruction adds up before their sum is
            added to the accumulator; a format that is not in it has no documented length.
        signed_codes: Products on integers take signed codes without zero points alone.
    """

    rates_tflops: Annotated[Mapping[Format, Positive], msgspec.Meta(min_length=1)]
    runs_as: Mapping[Format, Format] = msgspec.field(default_factory=dict[Format, Format])
    accumulates_in: Format = Format.FP32
    accumulation: Mapping[Format, Format] = msgspec.field(default_factory=dict[Format, Format])
    flushes_subnormals: frozenset[Format] = frozenset()
    blocks: Mapping[Format, Annotated[int, msgspec.Meta(gt=1)]] = msgspec.field(
        default_factory=dict[Format, int]
    )
    signed_codes: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a format that runs as none with a rate, or has one itself."""
        for fmt, real in self.runs_as.items():
            if real not in self.rates_tflops or fmt in self.rates_tflops:
                raise ValueError(
                    f"runs_as.{fmt.label} maps {fmt.label} to {real.label}, but only formats"
                    " without a rate can run as one that has a rate"
                )

    def computes_in(self, fmt: Format) -> Format | None:
        """The format that arithmetic on ``fmt`` is done in; None if the engine has none."""
        real = self.runs_as.get(fmt, fmt)
        return real if real in self.rates_tflops else None

    def rate_tflops(self, fmt: Format) -> float | None:
        """Rate for operands of ``fmt``; None if the engine cannot take it."""
        real = self.computes_in(fmt)
        return None if real is None else self.rates_tflops[real]

    def accumulation_of(self, fmt: Format) -> Format:
        """The format that sums of ``fmt`` products are kept in."""
        return self.accumulation.get(fmt, self.accumulates_in)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device.

    Attributes:
        name: As on the command line.
        description: One line for people.
        unit: The part that rates and bandwidth are given for: "one GPU".
        engines: Its engines; a device without a scalar engine uses the vector one.
        bandwidth_gb_s: Memory bandwidth of the unit, 1e9 bytes a second.
        op_overhead_s: Fixed cost of starting an op.
        cast_overhead_s: Fixed cost of a cast that stands alone.
        free_casts: Casts happen at the engines' ports and cost nothing.
        relayouts: Ways in which it can transpose, the compiler's default first.
        saturate_infinity: It can clamp infinities in the transposes that the compiler adds.
        saturating_fp8: Conversions to fp8 clamp to the largest number.
        stochastic_rounding: Users can switch on stochastic rounding.
        widened: Formats that engines turn into fp32 as they load a model: neither arithmetic
            nor memory traffic gains by them.
        casts_off: The flags by which its compiler adds no casts of its own; empty if it adds
            none.
    """

    name: str
    description: str
    unit: str
    engines: Mapping[EngineRole, EngineSpec]
    bandwidth_gb_s: float
    op_overhead_s: float
    cast_overhead_s: float
    free_casts: bool
    relayouts: tuple[Relayout, ...]
    saturate_infinity: bool
    saturating_fp8: bool
    stochastic_rounding: bool
    widened: frozenset[Format] = frozenset()
    casts_off: str = ""

    @property
    def is_cpu(self) -> bool:
        """Whether it is a CPU, on which finecast's own engines run models."""
        return self.unit == _CORE

    def engine(self, role: EngineRole) -> EngineSpec:
        """The engine that does this role's work."""
        return self.engines.get(role, self.engines[EngineRole.VECTOR])

    def engine_for(self, kind: OpKind) -> EngineSpec:
        """The engine that ops of ``kind`` run on."""
        return self.engine(role_of(kind))

    def computes_in(self, fmt: Format) -> bool:
        """Whether products of ``fmt`` are computed in it, and not in a wider format.

        For a format of constants alone: whether kernels read constants stored in it.
        """
        real = self.engine(EngineRole.MATMUL).computes_in(fmt)
        if real is None:
            return False
        # tf32 is stored as fp32: sizes alone would not tell fp32's products from its own
        as_fp32 = real is Format.FP32 and fmt is not real
        narrow = real.bits <= fmt.storage.bits and not as_fp32
        return narrow or not fmt.encodes_values

    def stored(self, fmt: Format) -> Format:
        """The format in which numbers of ``fmt`` rest in memory while a model runs."""
        return Format.FP32 if fmt in self.widened else fmt

    @property
    def low_formats(self) -> tuple[Format, ...]:
        """Formats worth trying where nobody names one, in order of preference.

        First bf16, fp16 and tf32, those that products are computed in (bf16 if none is); then
        8-bit formats whose products are faster than all of these, and int8_weights, with which
        less memory is read. fp8_e5m2, whose digits are for gradients, is not among them.
        """
        wide = tuple(f for f in _WIDE if self.computes_in(f)) or _WIDE[:1]
        products = self.engine(EngineRole.MATMUL)
        rates = {f: products.rate_tflops(f) or 0.0 for f in (*wide, *_NARROW)}
        slower = max(rates[f] for f in wide)
        narrow = (f for f in _NARROW if self.computes_in(f) and rates[f] > slower)
        alone = (f for f in (Format.INT8_WEIGHTS,) if self.computes_in(f))
        return (*wide, *narrow, *alone)


# Devices without a file of their own, and the one whose file describes them.
_ALIASES: Final = {"trn1n": "trn1"}
_PRODUCTS: Final = {
    "v100": "sm70",
    "t4": "sm75",
    "a100": "sm80",
    "l40s": "sm89",
    "h100": "sm90",
    "b200": "sm100",
    "inferentia": "inf1",
    "inferentia2": "inf2",
    "trainium": "trn1",
    "trainium2": "trn2",
    "trainium3": "trn3",
    "graviton3": "neoverse-v1",
    "sapphire-rapids": "amx",
    "broadwell": "avx2",
    "alder-lake": "avx2-vnni",
    "cooper-lake": "avx512-bf16",
    "cascade-lake": "avx512-vnni",
}
"""Names of products, by which devices are better known than by those of their targets."""
_WIDE: Final = (Format.BF16, Format.FP16, Format.TF32)
_NARROW: Final = (Format.FP8_E4M3, Format.INT8)
_SCALAR_KINDS = frozenset({OpKind.TRANSCENDENTAL, OpKind.SOFTMAX})
_SUFFIX = ".toml"
_MICRO = 1e-6
_CORE = "one core"
"""The unit of CPUs."""


def role_of(kind: OpKind) -> EngineRole:
    """The role that serves ops of ``kind``."""
    if kind.matmul_engine:
        return EngineRole.MATMUL
    return EngineRole.SCALAR if kind in _SCALAR_KINDS else EngineRole.VECTOR


@cache
def list_targets() -> tuple[str, ...]:
    """Names of all targets, sorted."""
    names = (entry.name for entry in files(__package__ or __name__).iterdir())
    return tuple(sorted(n.removesuffix(_SUFFIX) for n in names if n.endswith(_SUFFIX)))


def target_named(word: str) -> str:
    """The name of the target that a word of the user's means, as ``sm90`` for ``H100``."""
    name = spelled(word)
    return _PRODUCTS.get(name.replace(" ", "-"), name)


def products_of(name: str) -> tuple[str, ...]:
    """The names of products that mean the target called ``name``."""
    return tuple(product for product, target in _PRODUCTS.items() if target == name)


def load_target(name: str) -> Target:
    """The target called ``name``, or that of a product of this name.

    Raises:
        UsageError: If there is none; the message lists those that are.
    """
    known = {n: n for n in list_targets()} | _ALIASES
    if close_names(name, _PRODUCTS):  # else products are too many to list
        known |= _PRODUCTS
    word = spelled(name)
    if word and target_named(word) not in known:
        described = (n for n in list_targets() if word in spelled(_load(n).description))
        meant = [n for n in _PRODUCTS if n.startswith(word)] or [*described]
        if meant:
            raise UsageError(
                f"unknown target {name!r}", fix=f"did you mean {' or '.join(meant[:3])}?"
            )
    return _load(look_up(target_named(name), known, what="target"))


@cache
def _load(name: str) -> Target:
    file = files(__package__ or __name__) / f"{name}{_SUFFIX}"
    return parse_target(file.read_text(encoding="utf-8"), file=file.name)


class _Memory(SavedPart):
    bandwidth_gb_s: Positive
    widened: frozenset[Format] = frozenset()


class _Overhead(SavedPart):
    op_us: NotNegative
    cast_us: NotNegative
    free_casts: bool


class _Transposes(SavedPart):
    by: Annotated[tuple[Relayout, ...], msgspec.Meta(min_length=1)]


class _Saturation(SavedPart):
    infinity_in_transposes: bool
    fp8_conversions: bool


class _Engines(SavedPart):
    matmul: EngineSpec
    vector: EngineSpec
    scalar: EngineSpec | None = None


class _File(SavedPart, kw_only=True):
    """A target's file, whose units are in its names."""

    description: str
    unit: str
    stochastic_rounding: bool
    casts_off: str = ""
    memory: _Memory
    overhead: _Overhead
    engines: _Engines
    transposes: _Transposes
    saturation: _Saturation


def parse_target(text: str, *, file: str) -> Target:
    """Read one target's TOML.

    Raises:
        UsageError: If it is not TOML, or a key is missing, unknown or of the wrong type; the
            message names the file and the key.
    """
    with reading("target", file, "correct the file"):
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"not TOML: {error}") from error
        stated = converted(data, _File)
    engines = {role: getattr(stated.engines, role.value) for role in EngineRole}
    return Target(
        name=file.removesuffix(_SUFFIX),
        description=stated.description,
        unit=stated.unit,
        engines={role: spec for role, spec in engines.items() if spec is not None},
        bandwidth_gb_s=stated.memory.bandwidth_gb_s,
        op_overhead_s=stated.overhead.op_us * _MICRO,
        cast_overhead_s=stated.overhead.cast_us * _MICRO,
        free_casts=stated.overhead.free_casts,
        relayouts=stated.transposes.by,
        saturate_infinity=stated.saturation.infinity_in_transposes,
        saturating_fp8=stated.saturation.fp8_conversions,
        stochastic_rounding=stated.stochastic_rounding,
        widened=stated.memory.widened,
        casts_off=stated.casts_off,
    )
