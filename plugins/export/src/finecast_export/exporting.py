"""A plan in the words of a tool, and what these cannot say.

Laws: each op of the plan that reads or gives numbers is either stated as it is planned, or is
left out with the reason, and is in FP32 in what the tool makes. Nothing else is lowered than
what the plan lowers, but where the tool has a list for that of its own, which is said.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from finecast import Format, Plan
from finecast.errors import UsageError
from finecast.files import DATA_SUFFIX, CommandFiles, write_text
from finecast.naming import look_up
from finecast.planning import Decision

if TYPE_CHECKING:
    import onnx

TOOLS: Final = {
    "torchao": "torchao",
    "nncf": "nncf",
    "onnxruntime": "onnxruntime",
    "onnxconverter-common": "onnxconverter_common",
    "modelopt-autocast": "modelopt_autocast",
    "llm-compressor": "llm_compressor",
    "coremltools": "coremltools",
    "neuron": "neuron",
    "tensorrt": "tensorrt",
}
"""The module of each tool, in ``finecast_export.tools``, by its name on the command line."""
_TAKES_MODEL: Final = "tensorrt"
"""The tool that gets the plan's model, too, in its own file format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """An op that the tool does not get as it is planned, and why.

    ``saved_us`` and ``error`` are what finecast's figures say of its format beside FP32: the
    time that it saves, and the squared relative output error that the model then has. None
    where the plan has no such figures.
    """

    node: str
    format: str
    why: str
    saved_us: float | None = None
    error: float | None = None

    @classmethod
    def of(cls, decision: Decision, why: str) -> LeftOut:
        """What the plan knows of an op that is left out."""
        label = decision.format.label
        evidence = {k: v for r in decision.reasons for k, v in r.evidence.items()}
        times = [evidence.get(f"{fmt} us") for fmt in ("fp32", label)]
        error = evidence.get(f"error if {label}")
        fp32, low = (t if isinstance(t, float | int) else None for t in times)
        return cls(
            node=decision.node,
            format=label,
            why=why,
            saved_us=None if fp32 is None or low is None else float(fp32 - low),
            error=float(error) if isinstance(error, float | int) else None,
        )

    @property
    def text(self) -> str:
        """The op, its format, why the tool cannot have it so, and what that takes."""
        saved = self.saved_us
        cost = "" if saved is None else f"; in FP32 it takes {saved:.3g} us more"
        return f"{self.node} is {self.format} in the plan: {self.why}{cost}"

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON content."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan in the words of a tool.

    Attributes:
        tool: Its name.
        text: A module of Python, a recipe or flags.
        stated: How many ops it has in each low format.
        left_out: The ops that it has in FP32 though the plan lowers them.
        notes: What the tool does otherwise than the plan.
        write_model: Writes a model that the text reads: beside it, under its name with
            ``.onnx``. None if the text is all.
    """

    tool: str
    text: str
    stated: Mapping[str, int]
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    write_model: Callable[[Path], object] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON content, without the model."""
        left_out = [one.to_dict() for one in self.left_out]
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        del fields["write_model"]
        return {**fields, "left_out": left_out, "stated": dict(self.stated)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """The ops of a plan that read or give numbers: those that a tool can state, and others.

    ``low`` are those that it gets in a low format, ``kept`` all others.
    """

    low: tuple[Decision, ...]
    kept: tuple[Decision, ...]
    left_out: tuple[LeftOut, ...]

    @classmethod
    def of(
        cls,
        plan: Plan,
        tool: str,
        formats: Collection[Format],
        refusal: Callable[[Decision], str] = lambda _: "",
    ) -> Sorted:
        """The ops, of which a tool states those in its ``formats``.

        ``refusal`` says why the tool cannot state a low op whatever its format; empty if it
        can.
        """
        others = f"{tool} has {', '.join(f.label for f in formats)} alone"
        low: list[Decision] = []
        kept: list[Decision] = []
        left_out: list[LeftOut] = []
        for decision in plan.counted:
            why = ""
            if decision.format is not Format.FP32:
                why = refusal(decision) or ("" if decision.format in formats else others)
            if why:
                left_out.append(LeftOut.of(decision, why))
            (kept if why or decision.format is Format.FP32 else low).append(decision)
        return cls(low=tuple(low), kept=tuple(kept), left_out=tuple(left_out))

    @property
    def counts(self) -> dict[str, int]:
        """How many ops are stated in each format."""
        labels = [d.format.label for d in self.low]
        return {label: labels.count(label) for label in dict.fromkeys(labels)}


def not_linear(decision: Decision) -> str:
    """Why a tool that configures linear modules cannot state an op; empty if it is of one."""
    of_module = decision.op == "linear" and "/" in decision.node
    return "" if of_module else "the tool configures linear modules"


def library_of(plan: Plan) -> str:
    """Of which library the plan's model is: "onnx", "aten", "openvino"; empty if unknown."""
    first = next((one.attributes for one in plan.structure), "")
    return first.partition(":")[0] if ":" in first else ""


def check_library(plan: Plan, tool: str, *known: str) -> None:
    """Refuse a plan for a model that the tool does not read.

    Raises:
        UsageError: If the model is of another library than those ``known``.
    """
    library, names = library_of(plan), {"onnx": "ONNX", "aten": "PyTorch"}
    if library and library not in known:
        reads = " or ".join(names.get(k, k) for k in known)
        raise UsageError(
            f"{tool} reads models of {reads}, and the plan is for one of"
            f" {names.get(library, library)}",
            where="--to",
            fix=f"make the plan for the model as {reads}, or name another tool",
        )


def listing(name: str, items: Sequence[str]) -> str:
    """A list of strings in Python, one a line."""
    lines = "".join(f"    {item!r},\n" for item in items)
    return f"{name} = [\n{lines}]\n" if items else f"{name}: list[str] = []\n"


def heading(plan: Plan, tool: str, what: str) -> str:
    """The docstring of a module: the plan, and what to do."""
    counts = ", ".join(f"{count} {label}" for label, count in plan.counts.items())
    return f'"""{what}\n\nOf the plan {plan.digest} ({counts}), for {tool}.\n"""\n\n'


def export(
    plan: Plan | str | Path,
    to: str,
    output: str | Path | None = None,
    *,
    model: Path | str | onnx.ModelProto | None = None,
    force: bool = False,
) -> Exported:
    """A plan in the words of another tool.

    Args:
        plan: The plan, or its file.
        to: The tool: one of ``TOOLS``.
        output: Where the text is written; None for nowhere. A model goes beside it.
        model: The plan's model, which ``tensorrt`` needs.
        force: Replace a file that is there.

    Raises:
        UsageError: If there is no such tool, the plan is for a model of a library that it
            does not read, nothing of the plan can be stated, or what would be written is read
            too, or exists.
    """
    tool = look_up(to, {name: name for name in TOOLS}, what="tool", where="--to")
    files = CommandFiles(force=force)
    if isinstance(plan, str | Path):
        files.read("the plan", plan)
    if isinstance(model, str | Path):
        files.read("the model", model)
    files.write("the output", output)
    files.check_replaced()
    known = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    module = importlib.import_module(f"finecast_export.tools.{TOOLS[tool]}")
    _check_model(tool, model)
    exported: Exported = module.export(known, *(() if model is None else (model,)))
    if not exported.stated and known.lowers and tool != "neuron":
        why = exported.left_out[0].text if exported.left_out else "no op of it has numbers"
        raise UsageError(
            f"{tool} can express nothing of the plan", where=why, fix="name another tool"
        )
    if not known.lowers:
        raise UsageError(
            "the plan has no op in reduced precision", fix="export a plan of tune or convert"
        )
    if output is not None:
        path = Path(output)
        if exported.write_model is not None:
            from finecast.frontends.onnx import load

            if isinstance(model, str | Path):
                files.read("the model's external data", *load(Path(model)).external)
            beside = path.with_suffix(".onnx")
            if path == beside:
                raise UsageError(
                    "the script would be where its model is",
                    where=str(path),
                    fix="end it in .py",
                )
            data = beside.with_name(beside.name + DATA_SUFFIX)
            files.write("the output", beside, beside=(data,))
            files.check_replaced()
            exported.write_model(beside)
        write_text(path, exported.text)
    return exported


def _check_model(tool: str, model: object) -> None:
    """Raise UsageError if the tool needs a model and has none, or takes none and has one."""
    if (tool == _TAKES_MODEL) == (model is not None):
        return
    needs = model is None
    raise UsageError(
        f"{tool} {'gets the model in its types' if needs else 'takes the plan alone'}",
        where="--model",
        fix="name the model that the plan is for" if needs else "leave it out",
    )
