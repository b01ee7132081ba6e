"""What the user asks for: scope and format, rules, includes and excludes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from finecast.errors import UsageError
from finecast.naming import look_up
from finecast.numbers.formats import Format
from finecast.rules.ranges import Calibration


class Scope(Enum):
    """Which ops may be lowered; the meanings are those of neuronx-cc's ``--auto-cast``."""

    NONE = "none"
    MATMULT = "matmult"
    ALL = "all"
    AUTO = "auto"

    @classmethod
    def parse(cls, name: str) -> Scope:
        """Read a scope; ``matmul`` is accepted for ``matmult``.

        Raises:
            UsageError: If it is none of them.
        """
        table = {s.value: s for s in cls} | {"matmul": cls.MATMULT}
        return look_up(name, table, what="scope", where="--auto-cast")


class Adjust(Enum):
    """What may be changed of operands so that ops on codes err less, in this order."""

    EQUALISE = "equalise"
    SMOOTH = "smooth"
    BIAS = "bias"

    @classmethod
    def parse(cls, names: str, *, between: str = ",") -> tuple[Adjust, ...]:
        """Read their names; of ``none`` alone there are none.

        Raises:
            UsageError: If one is none of them, or named twice.
        """
        known: dict[str, Adjust | None] = {a.value: a for a in cls}
        known |= {"equalize": cls.EQUALISE, "none": None}
        given = names.split(between)
        found = [look_up(n, known, what="adjustment", where="--adjust") for n in given]
        named = tuple(a for a in cls if a in found)
        if len(named) != len(given) and found != [None]:
            raise UsageError(
                f"{names!r} names an adjustment twice, or none beside one",
                where="--adjust",
                fix="name each once",
            )
        return named


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Scope x formats, narrowed by name patterns and forced by op.

    Of several ``formats`` the scopes ``matmult`` and ``all`` take, for each op, the first that
    is permitted; ``auto`` decides by time and error.
    ``include`` and ``exclude`` are regular expressions searched in node names: with any
    include only matching nodes may be lowered, and no node that matches an exclude.
    ``op_formats`` forces all ops of a canonical or native name, a waiver of the rules of
    thumb, never of what the op's definition admits. ``io`` declares the format of inputs
    and outputs by name; ``io_low`` all of them. With ``keep_ops`` no op is stated as another
    that the engine recognises. ``open_formats`` says that nobody named ``formats``: whoever
    measures may try others that there are kernels for. ``calibration`` is how formats with
    scales take the range of a value from what was observed of it. ``adjust`` says how operands
    may be adjusted; None is the verb's own choice: ``tune`` tries all where a faster plan
    misses the criterion, ``convert``, which measures nothing unasked, none.
    """

    scope: Scope = Scope.AUTO
    formats: tuple[Format, ...] = (Format.BF16,)
    include: tuple[re.Pattern[str], ...] = ()
    exclude: tuple[re.Pattern[str], ...] = ()
    op_formats: Mapping[str, Format] = field(default_factory=dict[str, Format])
    io: Mapping[str, Format] = field(default_factory=dict[str, Format])
    io_low: bool = False
    keep_ops: bool = False
    open_formats: bool = False
    calibration: Calibration = Calibration.MINMAX
    adjust: tuple[Adjust, ...] | None = None

    @property
    def label(self) -> str:
        """The grammar ``SCOPE:FORMAT[,FORMAT...][@CALIBRATION][+ADJUSTMENT...]``.

        How formats with scales take ranges, and what is adjusted for them, is stated where it
        is not the default.
        """
        text = f"{self.scope.value}:{','.join(f.label for f in self.formats)}"
        if not any(f.scaled for f in self.formats):
            return text
        if self.calibration is not Calibration.MINMAX:
            text += f"@{self.calibration.value}"
        return "+".join((text, *(a.value for a in self.adjust or ())))

    @property
    def format(self) -> Format:
        """The first of the formats."""
        return self.formats[0]

    @property
    def stored(self) -> Format:
        """That of low inputs and outputs: the first that values rest in, if there is one."""
        found = (f for f in self.formats if not f.operands_only)
        return next(found, self.format.storage)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read ``SCOPE:FORMAT[,FORMAT...][@CALIBRATION][+ADJUSTMENT...]``.

        For example ``auto:bf16``, ``all:fp8_e4m3,bf16``, ``all:int8@mse+smooth+bias``.

        Raises:
            UsageError: If a part is unknown, or a format is named twice, or a calibration or
                an adjustment is given for formats that have no scales.
        """
        rest, plus, adjust = text.partition("+")
        wanted, at, how = rest.partition("@")
        scope, _, names = wanted.partition(":")
        parsed = Scope.parse(scope)
        formats = low_formats(names or "bf16")
        if (at or plus) and not any(f.scaled for f in formats):
            what = "a calibration" if at else "an adjustment"
            raise UsageError(
                f"{text!r}: {what}, and no format that has ranges",
                where="policy",
                fix="leave it out, or put int8 among the formats",
            )
        return cls(
            scope=parsed,
            formats=formats,
            open_formats=parsed is Scope.AUTO and not names,
            calibration=Calibration.parse(how) if at else Calibration.MINMAX,
            adjust=Adjust.parse(adjust, between="+") if plus else None,
        )

    @classmethod
    def of(cls, given: object) -> Policy:
        """A policy as users of the Python API give it: one, or its text.

        Raises:
            UsageError: If it is neither.
        """
        if isinstance(given, Policy):
            return given
        if not isinstance(given, str):
            raise UsageError(
                f"{given!r} is no policy", where="policy", fix="give a Policy, or as all:bf16"
            )
        return cls.parse(given)


def low_formats(names: str) -> tuple[Format, ...]:
    """``FORMAT[,FORMAT...]``: what may be computed in.

    Raises:
        UsageError: If one is unknown, or fp32, or named twice.
    """
    found = tuple(Format.parse(name) for name in names.split(","))
    if Format.FP32 in found:
        low_format(Format.FP32.label)  # says why not
    if len(set(found)) < len(found):
        raise UsageError(
            f"a format is named twice: {names}", where="--auto-cast-type", fix="name it once"
        )
    return found


def low_format(name: str) -> Format:
    """A format that values can be stored in and that is lower than fp32.

    Raises:
        UsageError: If ``name`` is not one.
    """
    fmt = Format.parse(name)
    if fmt.storage is Format.FP32:
        raise UsageError(
            f"{fmt.label} is not a storage format lower than fp32",
            where="--auto-cast-type",
            fix="use bf16 or fp16",
        )
    return fmt


def patterns(texts: tuple[str, ...], *, option: str) -> tuple[re.Pattern[str], ...]:
    """Compile regular expressions.

    Raises:
        UsageError: If one is not valid; names ``option``.
    """
    try:
        return tuple(re.compile(t) for t in texts)
    except re.error as error:
        raise UsageError(
            f"invalid regular expression {error.pattern!r}: {error}", where=option
        ) from error


def assignments(texts: tuple[str, ...], *, option: str) -> dict[str, Format]:
    """Read ``NAME=FORMAT`` pairs.

    Raises:
        UsageError: If one has another shape; names ``option``.
    """
    found: dict[str, Format] = {}
    for text in texts:
        name, equals, fmt = text.rpartition("=")
        if not equals or not name:
            raise UsageError(
                f"{text!r} is not NAME=FORMAT",
                where=option,
                fix="write for example Softmax=fp32",
            )
        found[name] = Format.parse(fmt)
    return found


def conversion_stays(was: str, policy: str) -> bool:
    """Whether a model converted to the policy labelled ``was`` stays so for ``policy``.

    Else the conversion is taken back first.
    """
    return policy == was or policy.partition(":")[0] == Scope.NONE.value
