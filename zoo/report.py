"""``docs/zoo.md``: what ran, with which errors, memory and speed, and what failed and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from finecast.measure.environment import environment
from zoo.left import LEFT
from zoo.networks import NETWORKS
from zoo.outcome import Outcome, Status
from zoo.stages import STAGES

Row = Mapping[str, Outcome]
Rows = Mapping[str, Row]

_INTRO: Final = """# The zoo

Architectures of torchvision, timm, transformers and diffusers with random weights in small
configurations, taken through all that finecast does with a model. Written by `make zoo`.

- **Error**: the norm of the difference from fp32 over fp32's norm, of the worst output.
- **Autocast** is `torch.autocast` in bf16.
- **Hint** is OpenVINO's precision hint on the fp32 model.
- **Gradient**: the error of all gradients of one compiled forward and backward pass.
- **MB**: the peak of what that pass allocates and frees again, in 2**20 bytes.
- **Where bf16 pays**: plans such as a CPU gets that does products in bf16 in a quarter of the
  time. Graphs run op by op, without kernels, and MB is what the forward pass saves."""

_TITLES: Final = {
    Status.FINECAST: "finecast's",
    Status.NETWORK: "The network's own: it cannot be built or trained in fp32",
    Status.EXPORT: "The export's own: `torch.onnx.export` fails, or its result is wrong",
    Status.ENGINE: "The engine's own: it fails in fp32, or without finecast, too",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A figure of a stage, under a title; ``beside`` is what it is held against.

    It is not to be more than ``bar`` times that.
    """

    title: str
    stage: str
    figure: str
    beside: str = ""
    bar: float = math.inf
    spec: str = ".2g"

    def cell(self, row: Row) -> str:
        """The figure as text; nothing where there is none."""
        found = _figures(row, self.stage)
        return format(found[self.figure], self.spec) if self.figure in found else ""

    def ratios(self, rows: Rows) -> dict[str, float]:
        """The figure over the one beside it, by network."""
        pairs = ((name, _figures(row, self.stage)) for name, row in rows.items())
        return {
            name: found[self.figure] / found[self.beside]
            for name, found in pairs
            if found.get(self.beside) and self.figure in found
        }


_TORCH: Final = (
    Column(title="`all`", stage="convert", figure="all", beside="autocast", bar=1.5),
    Column(title="`auto`", stage="convert", figure="auto", beside="autocast", bar=1.5),
    Column(title="autocast", stage="convert", figure="autocast"),
)
_BARS: Final = {"gradient `auto`": 1.1, "MB `all`": 1.0, "MB `auto`": 1.0}


def _training(stage: str) -> tuple[Column, ...]:
    return tuple(
        Column(
            title=f"{what}, {way}",
            stage=stage,
            figure=f"{figure} {way.strip('`')}",
            beside=f"{figure} autocast" if way != "autocast" else "",
            bar=_BARS.get(f"{figure} {way}", math.inf),
            spec=spec,
        )
        for what, figure, spec in (("gradient", "gradient", ".2g"), ("MB", "MB", ".2f"))
        for way in ("`all`", "`auto`", "autocast")
    )


_SPEED: Final = (
    Column(title="step, `auto`, over autocast's", stage="compile", figure="speed", spec=".2f"),
    *(
        Column(
            title=f"{low}, {exporter} export, over the hint's",
            stage=f"{exporter} {low}",
            figure="speed",
            spec=".2f",
        )
        for exporter in ("dynamo", "legacy")
        for low in ("bf16", "fp16")
    ),
)


def _onnx(exporter: str) -> tuple[Column, ...]:
    low, half = f"{exporter} bf16", f"{exporter} fp16"
    return (
        Column(title="bf16, OpenVINO", stage=low, figure="openvino", beside="hint"),
        Column(title="hint", stage=low, figure="hint"),
        Column(title="fp16, OpenVINO", stage=half, figure="openvino", beside="hint"),
        Column(title="hint", stage=half, figure="hint"),
        Column(title="fp16, ONNX Runtime", stage=half, figure="onnxruntime"),
    )


def render(outcomes: Sequence[Outcome]) -> str:
    """The whole document."""
    found: dict[str, dict[str, Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.network, {})[outcome.stage] = outcome
    rows = {name: found[name] for name in NETWORKS if name in found}
    parts = [
        f"{_INTRO}\n\n{_machine()}",
        _summary(rows),
        _section("PyTorch: errors of outputs", _TORCH, rows),
        _section("PyTorch: training where bf16 pays", _training("training"), rows),
        _section("PyTorch: a training step, compiled here", _training("compile"), rows),
        _section("ONNX, exported with dynamo: errors", _onnx("dynamo"), rows),
        _section("ONNX, exported without dynamo: errors", _onnx("legacy"), rows),
        _section("Speed", _SPEED, rows),
        _failures(rows),
        LEFT,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine() -> str:
    here = environment()
    libraries = ", ".join(f"{name} {version}" for name, version in here.libraries.items())
    return f"{here.cpu}, {here.cores} cores; finecast {here.finecast}; {libraries}."


def _summary(rows: Rows) -> str:
    cells = {
        stage: [row[stage].status for row in rows.values() if stage in row] for stage in STAGES
    }
    body = [
        [stage, f"{len(f)} of {len(NETWORKS)}", *(str(f.count(s) or "") for s in Status)]
        for stage, f in cells.items()
    ]
    head = "How many architectures each stage was run with. The failures are listed below."
    titles = ["stage", "run", *(s.value for s in Status)]
    return f"## Outcomes\n\n{head}\n\n" + _table(titles, body)


def _section(title: str, columns: Sequence[Column], rows: Rows) -> str:
    """A table of the networks that have a figure, and the ratios that it shows."""
    body = [
        [name, NETWORKS[name].library, *(column.cell(row) for column in columns)]
        for name, row in rows.items()
    ]
    body = [cells for cells in body if any(cells[2:])]
    if not body:
        return ""
    ratios = [line for column in columns if (line := _ratios(column, rows))]
    head = ["architecture", "library", *(column.title for column in columns)]
    return "\n\n".join((f"## {title}", _table(head, body), "\n".join(ratios))).rstrip()


def _ratios(column: Column, rows: Rows) -> str:
    found = column.ratios(rows)
    if not found:
        return ""
    worst = max(found, key=lambda name: found[name])
    middle = median(found.values())
    beside = f"{column.beside.rpartition(' ')[2]}'s"
    line = (
        f"- {column.title}, over {beside}: median {middle:.2f}, "
        f"most {found[worst]:.2f} ({worst})"
    )
    above = [f"{name} {found[name]:.2f}" for name in found if found[name] > column.bar]
    bar = f"; above the bar of {column.bar:g}: {', '.join(above) or 'none'}"
    return f"{line}{bar if column.bar < math.inf else ''}."


def _failures(rows: Rows) -> str:
    parts = ["## Failures"]
    for status, title in _TITLES.items():
        lines = _lines(rows, lambda o, s=status: [o.cause] if o.status is s else [])
        parts.append("\n".join([f"### {title}", "", *(lines or ["None."])]))
    notes = _lines(rows, lambda o: list(o.notes))
    parts.append("\n".join(["### What else was said", "", *(notes or ["Nothing."])]))
    return "\n\n".join(parts)


def _lines(rows: Rows, said: Callable[[Outcome], list[str]]) -> list[str]:
    """What outcomes say, the same words once."""
    where: dict[str, list[str]] = {}
    for name, row in rows.items():
        for stage, outcome in row.items():
            for text in said(outcome):
                where.setdefault(text, []).append(f"{name} ({stage})")
    return [f"- {', '.join(places)}: {_inline(text)}" for text, places in where.items()]


def _figures(row: Row, stage: str) -> Mapping[str, float]:
    return row[stage].figures if stage in row else {}


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _inline(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "/") + "`"
