"""The user's request: scope and formats, patterns of names, formats by op and by port."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from finecast.calls import checks
from finecast.errors import UsageError
from finecast.naming import (
    Option,
    assignments,
    convert_options,
    default_of,
    look_up,
    member_of,
    spelled,
    unknown_name,
)
from finecast.numbers.formats import Format
from finecast.rules.ranges import Calibration

DEFAULT_POLICY: Final = "auto"
"""The policy of every verb that is given none: each op by its time and error here."""

BY_HINT: Final = " by hint"
"""Ends the label of a policy whose plans are stated by an engine's precision hint."""


_calibration: Final = partial(member_of, Calibration, what="calibration")


class Scope(Enum):
    """Which ops may be lowered.

    NONE, MATMULT and ALL mean what they mean to the compilers that have ``--auto-cast``. AUTO
    decides by time and error. The last two are ALL with what another tool keeps in fp32:
    LIKE_AUTOCAST as much as the output error predicted for ``torch.autocast`` allows, beside
    all products, for programs of PyTorch; LIKE_GRAPPLER all but what ends the model, as
    TensorFlow's Grappler.
    """

    NONE = "none"
    MATMULT = "matmult"
    ALL = "all"
    AUTO = "auto"
    LIKE_AUTOCAST = "like-autocast"
    LIKE_GRAPPLER = "like-grappler"

    @classmethod
    def parse(cls, name: str) -> Scope:
        """Read a scope; ``matmul`` is accepted for ``matmult``.

        Raises:
            UsageError: If it is not a scope.
        """
        table = {s.value: s for s in cls} | {"matmul": cls.MATMULT}
        if spelled(name) in {f.label for f in Format}:
            raise UsageError(
                f"{name!r} is a format, and a scope is expected",
                where="--auto-cast, or policy",
                fix=f"write all:{spelled(name)} as a policy, or --auto-cast all"
                f" --auto-cast-type {spelled(name)}; scopes are {', '.join(table)}",
            )
        return look_up(name, table, what="scope", where="--auto-cast, or policy")


class Adjust(Enum):
    """Adjustments of operands, in order of application.

    RANGE brings values into the range of fp16, and is made before the rules judge the ops;
    BIAS takes mean errors of products on codes off their biases.
    """

    RANGE = "range"
    BIAS = "bias"

    @classmethod
    def parse(cls, names: str, *, between: str = ",") -> tuple[Adjust, ...]:
        """Read a list of names; ``none`` alone gives an empty tuple.

        Raises:
            UsageError: If a name is unknown or given twice.
        """
        known: dict[str, Adjust | None] = {a.value: a for a in cls}
        known |= {"none": None}
        given = names.split(between)
        found = [look_up(n, known, what="adjustment", where="--adjust") for n in given]
        named = tuple(a for a in cls if a in found)
        if len(named) != len(given) and found != [None]:
            raise UsageError(
                f"{names!r} names an adjustment twice, or 'none' beside another",
                where="--adjust",
                fix="name each once",
            )
        return named


_PORTS: Final = {"reduced": "io_low", "low": "io_low", "state": "io_state"}
"""Words for inputs and outputs that are named by no name, and the fields that they set."""


@checks
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Policy:
    """Which ops may be lowered, and to which formats.

    For example ``Policy("auto:bf16,fp16", keep={"Softmax": "fp32"})``. What is given as text
    is read as the command line reads it.

    Attributes:
        scope: Which ops may be lowered.
        formats: The low formats. An op has the first that is permitted; with scope ``auto``
            time and error decide.
        keep: Formats by op, as ``op_formats``; given to the constructor alone.
        include: Regular expressions searched in node names: if there are any, only matching
            nodes may be lowered.
        exclude: Regular expressions searched in node names: matching nodes stay fp32.
        op_formats: Formats of all ops of a canonical or native name. They override rules of
            thumb, never what the op's definition admits.
        io: Declared formats of inputs and outputs, by name.
        io_low: Whether all inputs and outputs are declared in the low format.
        io_state: Whether plans decide the type of inputs and outputs that carry state, too.
        state: The output that becomes an input of the next call, by the input's name; empty
            to find them by their names.
        keep_ops: Whether ops are kept as they are, and none is replaced by an op that the
            engine recognises.
        by_hint: Whether the model stays in fp32, with marks on the ops that keep it, and the
            engine lowers the others by its own precision hint.
        open_formats: Whether ``formats`` is a default, so that ``tune`` may try others that
            the engine has kernels for.
        calibration: How the range of an encoding is chosen from observed values.
        adjust: How operands may be adjusted. None: values are scaled that leave the range of
            a format. ``tune`` tries the other adjustments, too, if a faster plan loses
            too much; ``convert``, which does not measure, makes none of them.
    """

    scope: Scope = field(default=Scope.AUTO, kw_only=False)
    formats: tuple[Format, ...] = (Format.BF16,)
    keep: InitVar[Mapping[str, Format | str] | None] = None
    include: tuple[re.Pattern[str], ...] = Option(
        help="Change only the ops whose name matches; repeatable.",
        metavar="REGEX",
        many=True,
        convert=lambda given: patterns(given, option="--include"),
    ).field(())
    exclude: tuple[re.Pattern[str], ...] = Option(
        help="Keep the ops whose name matches in fp32; repeatable.",
        metavar="REGEX",
        many=True,
        convert=lambda given: patterns(given, option="--exclude"),
    ).field(())
    op_formats: Mapping[str, Format] = Option(
        help="The format of a kind of op, as Softmax=fp32; repeatable.",
        flags=("--op",),
        metavar="OP=FORMAT",
        many=True,
        convert=lambda given: formats_by_name(given, option="--op"),
    ).field({})
    io: Mapping[str, Format] = Option(
        help="Types of inputs and outputs. NAME=FORMAT for one, 'reduced' for all in reduced"
        " precision, 'state' to choose that of a cache which the caller keeps between calls."
        " Default: types are kept.",
        metavar="reduced|state|NAME=FORMAT",
        many=True,
        convert=lambda given: _formats_of_ports(given),
    ).field({})
    io_low: bool = False
    io_state: bool = False
    state: Mapping[str, str] = field(default_factory=dict[str, str])
    keep_ops: bool = Option(
        help="Change types only: replace no op by another that the engine has a kernel for.",
        kind=bool,
    ).field(False)
    by_hint: bool = Option(
        help="Write OpenVINO IR for its precision hint instead of casts: ops that keep fp32"
        " are marked, the hint takes the others. tune tries both ways.",
        kind=bool,
    ).field(False)
    open_formats: bool = False
    calibration: Calibration = Option(
        help="How int8 ranges are calibrated: minmax (default) covers all of --data,"
        " percentile 99.99% of it, mse has the least squared error. Of 4-bit weights mse"
        " chooses the range of each group, and gptq the integers with the least error of"
        " products on --data.",
        metavar="HOW",
        convert=_calibration,
    ).field(Calibration.MINMAX)
    adjust: tuple[Adjust, ...] | None = Option(
        help="Corrections that are kept if they reduce the error on --data: range (fp16: scale"
        " values that overflow, by powers of two; on by default), bias (int8: correct the bias"
        " by the mean error; tune tries it where a faster plan loses too much), range,bias or"
        " none.",
        metavar="WHAT",
        convert=lambda given: Adjust.parse(given) if isinstance(given, str) else given,
    ).field(None)

    if TYPE_CHECKING:
        # The generated one has the fields' types, which text is converted to.
        def __init__(
            self,
            scope: Scope | str = Scope.AUTO,
            *,
            keep: Mapping[str, Format | str] | None = None,
            **fields: Any,
        ) -> None: ...

    def __post_init__(self, keep: Mapping[str, Format | str] | None) -> None:
        """Read what was given as text.

        Raises:
            UsageError: If a text cannot be read.
        """
        text: object = self.scope
        if isinstance(text, str):
            stated = Policy.parse(text)
            for name in ("scope", "formats", "open_formats", "calibration", "adjust"):
                if name == "scope" or getattr(self, name) == default_of(Policy, name):
                    object.__setattr__(self, name, getattr(stated, name))
        io: object = [self.io] if isinstance(self.io, str) else self.io
        if isinstance(io, list | tuple):
            stated = {port: _PORTS.get(spelled(port)) for port in cast("Sequence[str]", io)}
            for name in _PORTS.values():
                object.__setattr__(self, name, name in stated.values())
            object.__setattr__(self, "io", [port for port, name in stated.items() if not name])
        convert_options(self)
        if keep:
            object.__setattr__(
                self, "op_formats", {**self.op_formats, **formats_by_name(keep)}
            )

    def __repr__(self) -> str:
        """The call that makes it."""
        text = self.label.removesuffix(BY_HINT)
        if self.open_formats:
            how, default = self.calibration, Calibration.MINMAX
            text = self.scope.value + (f"@{how.value}" if how is not default else "")
        parts: dict[str, object] = {
            "keep": {name: fmt.label for name, fmt in self.op_formats.items()},
            "include": [one.pattern for one in self.include],
            "exclude": [one.pattern for one in self.exclude],
            "io": {name: fmt.label for name, fmt in self.io.items()},
            "io_low": self.io_low,
            "io_state": self.io_state,
            "keep_ops": self.keep_ops,
            "by_hint": self.by_hint,
        }
        stated = (f", {name}={value!r}" for name, value in parts.items() if value)
        return f"Policy({text!r}{''.join(stated)})"

    @property
    def retypes_ports(self) -> bool:
        """Whether inputs and outputs may change type."""
        return bool(self.io or self.io_low or self.io_state)

    @property
    def label(self) -> str:
        """The policy as ``SCOPE:FORMAT[,FORMAT...][@CALIBRATION][+ADJUSTMENT...]``.

        Calibration is stated for formats that it changes codes in, and adjustments for those
        that they are for, if not the default. Where plans are stated by a hint, ``BY_HINT``
        ends it.
        """
        text = f"{self.scope.value}:{','.join(f.label for f in self.formats)}"
        text += BY_HINT if self.by_hint else ""
        if any(self.calibration.changes(f) for f in self.formats):
            text += f"@{self.calibration.value}"
        if self.adjust is None or not self.adjusts:
            return text
        return "+".join((text, *([a.value for a in self.adjust] or ["none"])))

    @property
    def adjusts(self) -> bool:
        """Whether operands are adjusted for a format: one with scales, or of less range."""
        return any(f.has_scales or f.has_less_range for f in self.formats)

    def calibrated(self, how: Calibration | str) -> Policy:
        """This policy with that calibration.

        Raises:
            UsageError: If it is unknown, or applies to none of the formats.
        """
        found = _calibration(how)
        # Formats that tune may add beside an open policy's own.
        added = (Format.INT8, Format.INT8_WEIGHTS) if self.open_formats else ()
        if not any(found.suits(f) for f in (*self.formats, *added)):
            suited = [f.label for f in Format if found.suits(f)]
            raise UsageError(
                f"{found.value} changes nothing in {', '.join(f.label for f in self.formats)}:"
                f" it is for {', '.join(suited)}",
                where="--calibration",
                fix=f"leave it out, or add --auto-cast-type {suited[0]}",
            )
        return replace(self, calibration=found)

    @property
    def format(self) -> Format:
        """The first of the formats."""
        return self.formats[0]

    @property
    def stored(self) -> Format:
        """The format of low inputs and outputs: the first that values can be stored in."""
        found = (f.storage for f in self.formats if f.encodes_results)
        return next(found, self.format.storage)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read ``SCOPE:FORMAT[,FORMAT...][@CALIBRATION][+ADJUSTMENT...]``.

        For example ``auto:bf16``, ``all:fp8_e4m3,bf16``, ``all:int8@mse+bias``.

        Raises:
            UsageError: If a part is unknown, or a format is named twice, or a calibration or
                an adjustment is given for formats that it does not apply to.
        """
        rest, plus, adjust = text.partition("+")
        wanted, at, how = rest.partition("@")
        scope, _, names = wanted.partition(":")
        parsed = Scope.parse(scope)
        formats = low_formats(names or "bf16")
        found = cls(
            scope=parsed,
            formats=formats,
            open_formats=parsed is Scope.AUTO and not names,
            adjust=Adjust.parse(adjust, between="+") if plus else None,
        )
        if plus and not found.adjusts:
            raise UsageError(
                f"{text!r}: an adjustment is given, and none of the formats has scales or a"
                " smaller range than fp32",
                where="policy",
                fix="leave it out, or put int8 or fp16 among the formats",
            )
        return found.calibrated(how) if at else found

    @classmethod
    def of(cls, given: object) -> Policy:
        """The policy that a user of the Python API gave, as a ``Policy`` or as text.

        Raises:
            UsageError: If it is neither, or its calibration applies to none of its formats.
        """
        if isinstance(given, Policy):
            stated = given.calibration is not Calibration.MINMAX
            return given.calibrated(given.calibration) if stated else given
        if not isinstance(given, str):
            raise UsageError(
                f"{given!r} is no policy", where="policy", fix="give a Policy, or as all:bf16"
            )
        return cls.parse(given)


def low_formats(names: str) -> tuple[Format, ...]:
    """Read ``FORMAT[,FORMAT...]``, the low formats of a policy.

    Raises:
        UsageError: If one is unknown, or fp32, or named twice.
    """
    found = tuple(Format.parse(name) for name in names.split(","))
    if Format.FP32 in found:
        low_format(Format.FP32.label)  # raises with the reason
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


def patterns(
    given: Sequence[str | re.Pattern[str]] | None, *, option: str
) -> tuple[re.Pattern[str], ...]:
    """Compile regular expressions.

    Raises:
        UsageError: If one is not valid; names ``option``.
    """
    try:
        return tuple(re.compile(one) for one in given or ())
    except re.error as error:
        raise UsageError(
            f"invalid regular expression {error.pattern!r}: {error}", where=option
        ) from error


def formats_by_name(
    given: Mapping[str, Format | str] | Sequence[str] | None, *, option: str = "--op"
) -> dict[str, Format]:
    """Formats by name, also of ``NAME=FORMAT`` texts.

    Raises:
        UsageError: If a text has another shape; names ``option``.
    """
    found = assignments(
        given, Format.parse, where=option, form="NAME=FORMAT", fix="write Softmax=fp32"
    )
    return {n: f if isinstance(f, Format) else Format.parse(f) for n, f in found.items()}


def _formats_of_ports(
    given: Mapping[str, Format | str] | Sequence[str],
) -> dict[str, Format]:
    """Formats of inputs and outputs by name, also of ``NAME=FORMAT`` texts.

    Raises:
        UsageError: If a text has another shape.
    """
    for text in () if isinstance(given, Mapping) else given:
        if "=" not in text:
            raise unknown_name(text, [*_PORTS, "NAME=FORMAT"], what="word", where="--io")
    return formats_by_name(given, option="--io")
