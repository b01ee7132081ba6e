"""A converted model: where it goes, and how its numbers are compared with fp32's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from finecast.data.deviation import deviations, differing
from finecast.engines.base import Array
from finecast.engines.exact import worst_first
from finecast.errors import UsageError
from finecast.files import DATA_SUFFIX, check_writable
from finecast.naming import (
    Option,
    convert_options,
    left_out,
    listed,
    number_of,
    path_of,
    percent,
)
from finecast.native.gains import Gain
from finecast.numbers.thresholds import LIMIT
from finecast.planning.free_rows import FreeOutput, Matched, matched
from finecast.planning.plan import Plan
from finecast.planning.sensitivity import is_float
from finecast.planning.slices import check_axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a model goes.

    Attributes:
        path: The model's file; None for a model in memory, verified as if it were written.
        force: Whether existing files may be replaced.
        external_data: Whether tensors go to ``NAME.data`` beside the model; None for where
            the source had them, or where they do not fit one file.
        plan_out: Where the plan is written, too; None for nowhere, and beside the model by
            ``tune``, which writes it only with a model.
    """

    path: Path | None = Option(
        help="The file to write.",
        flags=("-o", "--output"),
        metavar="FILE",
        kind=Path,
        keywords=("output",),
        convert=path_of,
    ).field(None)
    force: bool = Option(help="Overwrite existing files.", kind=bool).field(False)
    external_data: bool | None = Option(
        help="Weights in NAME.data beside the output, or all in one file. Default: as in the"
        " model given; from 1.8 GB on in NAME.data.",
        flags=("--external-data/--one-file",),
        kind=bool,
    ).field(None)
    plan_out: Path | None = Option(
        help="Write the plan to this file, too.",
        metavar="FILE.json",
        kind=Path,
        convert=path_of,
    ).field(None)

    def __post_init__(self) -> None:
        """Read a path that was given as text."""
        convert_options(self)

    def check_plain(self, kind: str) -> None:
        """Raise UsageError for the option that is for ONNX files alone, not for ``kind``."""
        if self.external_data is not None:
            raise UsageError(
                f"--external-data/--one-file does not apply to {kind}",
                where=str(self.path),
                fix="leave it out",
            )

    def check(self, *, apart: bool = False) -> None:
        """Raise UsageError unless the model, and its tensors if ``apart``, may be written."""
        if self.path is None:
            return
        check_writable(self.path, force=self.force)
        if apart:
            data = self.path.with_name(self.path.name + DATA_SUFFIX)
            check_writable(data, force=self.force)


_MOST_TOLD: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """How many decisions of an op inside the model are others than fp32's.

    Attributes:
        node: The op's name.
        op: Its native type, without the library.
        changed: Decisions that differ.
        count: Decisions in all.
        shape: Their shape over all data; their number where shapes differ from call to call.
    """

    node: str
    op: str
    changed: int
    count: int
    shape: tuple[int, ...]

    @property
    def share(self) -> float:
        """The share of the decisions that differ."""
        return self.changed / max(self.count, 1)

    @property
    def text(self) -> str:
        """The share in a sentence."""
        named = self.node if self.node == self.op else f"{self.node} ({self.op})"
        return f"{percent(self.share)} of the {self.count:,} decisions of {named} change"

    def to_dict(self) -> dict[str, Any]:
        """All of it as strict JSON."""
        return {
            "node": self.node,
            "op": self.op,
            "share": self.share,
            "changed": self.changed,
            "count": self.count,
            "shape": list(self.shape),
            "text": self.text,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """How the written model was verified.

    Attributes:
        engine: The engine that ran it; None where it was not run.
        max_abs_error: The largest absolute error of the output or slice with the largest
            relative error, the first of ``outputs``; None where nothing was run.
        relative_error: The largest over outputs y of ||y - r|| / ||r||, where r is the
            output of the reference; None where nothing was run, or no output has floats.
        outputs: The relative error by output, the worst first. Slices of an output that have
            different units are apart, named as ``y[:, 4:24]``.
        largest: The largest absolute error by output or slice, in its own unit.
        note: What was not done or not compared, and why.
        reference: What the errors are against: the fp32 model, the fp64 model that it was
            converted from, or the model given where that was converted or quantized before.
        taken_error: Of an error against fp64, what the conversion to fp32 alone gives.
        sizes: Sizes of the free dimensions of the inputs.
        kernels: Number of kernels of the fp32 model and of the written one, where known.
        apart: Texts on kernels of the fp32 model whose low ops run in several kernels now.
        random: Whether the errors are those on random inputs, and not on data.
        samples: The number of samples that the errors are of, the first of the data.
        decisions: What changes of the decisions inside the model, those of the largest share
            of changes first; none without data.
        warnings: Why the errors say little of the model: they are large and yet explained,
            or the inputs cannot show an error.
    """

    engine: str | None
    max_abs_error: float | None = None
    relative_error: float | None = None
    outputs: Mapping[str, float] = field(default_factory=dict[str, float])
    largest: Mapping[str, float] = field(default_factory=dict[str, float])
    note: str = ""
    reference: str = "fp32"
    taken_error: float | None = None
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    kernels: tuple[int, int] | None = None
    apart: tuple[str, ...] = ()
    random: bool = False
    samples: int = 0
    decisions: tuple[Decisions, ...] = ()
    warnings: tuple[str, ...] = ()

    def noted(self, *texts: str) -> Verified:
        """With these texts behind its note; empty ones are left out."""
        return replace(self, note="; ".join(filter(None, (self.note, *texts))))

    @property
    def decided(self) -> list[str]:
        """Lines on the decisions inside the model that change, the largest shares alone."""
        texts = [one.text for one in self.decisions if one.changed]
        return texts[:_MOST_TOLD] + left_out(len(texts), _MOST_TOLD, " ops decide otherwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A model converted by a policy or a plan.

    Attributes:
        plan: The format of every op, and why.
        counts: Number of ops by the format that they compute in.
        nodes: Nodes of the graph before the conversion.
        casts: Casts between ops: those of inputs and outputs are not among them.
        size_bytes: Bytes of the model before and after.
        seconds: How long the conversion took.
        verified: How the model was verified as it was written, or would be.
        output: The file or folder that was written.
        model: The model in the kind that was given. None if it was converted to a file.
        warnings: Notes for the user.
        restated: Low ops that were rewritten as the engine's matchers know them, and why.
        gains: What the adjustments asked for do to the error. The model has those that gain.
    """

    plan: Plan
    counts: Mapping[str, int]
    nodes: int
    casts: int
    size_bytes: tuple[int, int]
    seconds: float
    verified: Verified
    output: Path | None = None
    model: Any = None
    warnings: tuple[str, ...] = ()
    restated: tuple[str, ...] = ()
    gains: tuple[Gain, ...] = ()


def compare(
    engine: str,
    got: Mapping[str, Array],
    wanted: Mapping[str, Array],
    free: Sequence[FreeOutput] = (),
    axis: int | None = None,
) -> Verified:
    """The errors of float outputs, the absolute one of the worst, and what else differs.

    Outputs of ``free`` length are compared row by row; of those that are no floats the error
    is that of having a row or not. ``axis`` is that of the outputs' slices; None to find them.
    """
    check_axis(axis, wanted.values())
    pairs = matched(free, got, wanted)
    got, wanted = pairs.got, pairs.wanted
    differences = {
        f"{name}{part}": one
        for name, array in wanted.items()
        if is_float(array)
        for part, one in deviations(got[name], array, axis).items()
    }
    outputs = worst_first({n: d.relative for n, d in differences.items() if d.comparable})
    relative = max(outputs.values(), default=0.0)
    largest = {name: differences[name].largest for name in outputs}
    notes = [*_lone_rows(pairs), *_apart(got, wanted, every=not differences)]
    if all(not one.size for one in wanted.values()):
        notes = ["every output is empty: nothing was compared"]
    if relative >= LIMIT:
        notes.append(
            "no digit of the worst output agrees: judge the model on your data, by `tune`"
        )
    return Verified(
        engine=engine,
        max_abs_error=next(iter(largest.values()), 0.0) if differences else None,
        relative_error=relative if differences else None,
        outputs=outputs,
        largest=largest,
        note="; ".join(notes),
    )


def _lone_rows(pairs: Matched) -> list[str]:
    """How many rows of outputs of free length have no partner, where some have none."""
    names_by_counts: dict[tuple[int, int, int], list[str]] = {}
    for name, (_, wanted) in pairs.numbers.items():
        counts = *pairs.unmatched(name), int((wanted >= 0).sum())
        if any(counts[:2]):
            names_by_counts.setdefault(counts, []).append(name)
    told = [
        f"of {listed(names, _MOST_TOLD)} {lost} of fp32's {number_of(count, 'row')} are not"
        f" there, and {new} are new"
        for (lost, new, count), names in names_by_counts.items()
    ]
    return told[:_MOST_TOLD] + left_out(len(told), _MOST_TOLD, " outputs differ")


def _apart(got: Mapping[str, Array], wanted: Mapping[str, Array], *, every: bool) -> list[str]:
    """What differs beside the numbers of floats: values of other types, and shapes.

    If ``every``, outputs that do not differ are listed, too.
    """
    notes: list[str] = []
    for name, array in wanted.items():
        shape = got[name].shape
        if shape != array.shape:
            text = f"output {name!r} has shape {list(shape)}, fp32's {list(array.shape)}"
            notes.append(f"{text}: what is in it decides that")
        elif not is_float(array) and ((count := differing(got[name], array)) or every):
            notes.append(f"output {name!r}: {count} of {array.size} values differ")
    return notes[:_MOST_TOLD] + left_out(len(notes), _MOST_TOLD, " outputs differ")
