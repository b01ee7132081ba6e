"""``docs/zoo.md``: what ran, with which errors and memory, and what failed and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from zoo.networks import NETWORKS
from zoo.outcome import Outcome, Status
from zoo.stages import STAGES

Rows = Mapping[str, Mapping[str, Outcome]]

_INTRO = """# The zoo

Architectures of torchvision, timm, transformers and diffusers with random weights in small
configurations. Written by `make zoo`; do not edit.

Relative errors are norms against the same network in fp32. *Autocast* is `torch.autocast` in
bf16; *hint* is OpenVINO's precision hint on the fp32 model. Activation memory is the peak of
what one compiled forward and backward pass allocates and frees again."""


def render(outcomes: Sequence[Outcome]) -> str:
    """The whole document."""
    rows: dict[str, dict[str, Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.network, {})[outcome.stage] = outcome
    rows = {name: rows[name] for name in NETWORKS if name in rows}
    parts = [_INTRO, _summary(rows), _in_torch(rows), _in_onnx(rows), _failures(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary(rows: Rows) -> str:
    lines = [f"{len(rows)} architectures. Stages by outcome:", ""]
    lines += _table_head(("stage", *(s.value for s in Status)))
    for stage in STAGES:
        found = [row[stage].status for row in rows.values() if stage in row]
        lines.append(_line((stage, *(str(found.count(s) or "") for s in Status))))
    return "## Outcomes\n\n" + "\n".join(lines)


def _in_torch(rows: Rows) -> str:
    head = (
        "architecture",
        "library",
        "`all`",
        "`auto`",
        "autocast",
        "gradient",
        "autocast's",
        "MB",
        "autocast's",
    )
    lines = [*_table_head(head)]
    for name, row in rows.items():
        first, second = _figures(row, "convert"), _figures(row, "compile")
        cells = [_number(first, key) for key in ("all", "auto", "autocast")]
        cells += [_number(second, f"gradient {w}") for w in ("finecast", "autocast")]
        cells += [_number(second, f"MB {w}", ".2f") for w in ("finecast", "autocast")]
        lines.append(_line((name, NETWORKS[name].library, *cells)))
    lines.append("")
    lines += [
        _ratios(rows, "convert", "all", "autocast", "Error of `all` over autocast's"),
        _ratios(rows, "convert", "auto", "autocast", "Error of `auto` over autocast's"),
        _ratios(
            rows,
            "compile",
            "gradient finecast",
            "gradient autocast",
            "Error of gradients over autocast's",
        ),
        _ratios(
            rows, "compile", "MB finecast", "MB autocast", "Activation memory over autocast's"
        ),
    ]
    return "## PyTorch, bf16\n\n" + "\n".join(lines).rstrip()


def _in_onnx(rows: Rows) -> str:
    head = (
        "architecture",
        "export",
        "bf16, OpenVINO",
        "hint",
        "fp16, OpenVINO",
        "hint",
        "fp16, ONNX Runtime",
    )
    lines = [*_table_head(head)]
    for name, row in rows.items():
        for exporter in ("dynamo", "legacy"):
            low, half = (_figures(row, f"{exporter} {x}") for x in ("bf16", "fp16"))
            cells = [_number(f, key) for f in (low, half) for key in ("openvino", "hint")]
            lines.append(_line((name, exporter, *cells, _number(half, "onnxruntime"))))
    lines.append("")
    for low in ("bf16", "fp16"):
        for exporter in ("dynamo", "legacy"):
            stage = f"{exporter} {low}"
            lines.append(
                _ratios(rows, stage, "openvino", "hint", f"Error over the hint's, {stage}")
            )
    return "## ONNX, `--auto-cast all`\n\n" + "\n".join(lines).rstrip()


def _ratios(rows: Rows, stage: str, mine: str, other: str, what: str) -> str:
    found = {
        name: figures[mine] / figures[other]
        for name, figures in ((n, _figures(row, stage)) for n, row in rows.items())
        if figures.get(other) and mine in figures
    }
    if not found:
        return ""
    worst = max(found, key=lambda name: found[name])
    middle = median(found.values())
    return f"- {what}: median {middle:.2f}, largest {found[worst]:.2f} ({worst})."


def _failures(rows: Rows) -> str:
    parts: list[str] = ["## Failures"]
    for status in (Status.FINECAST, Status.NETWORK, Status.EXPORT, Status.ENGINE):
        lines = [
            f"- **{name}**, {stage}: {_inline(outcome.cause)}"
            for name, row in rows.items()
            for stage, outcome in row.items()
            if outcome.status is status
        ]
        parts.append("\n".join([f"### {_TITLES[status]}", "", *(lines or ["None."])]))
    notes = [
        f"- **{name}**, {stage}: {_inline(note)}"
        for name, row in rows.items()
        for stage, outcome in row.items()
        for note in outcome.notes
    ]
    parts.append("\n".join(["### What else was said", "", *(notes or ["Nothing."])]))
    return "\n\n".join(parts)


_TITLES = {
    Status.FINECAST: "finecast's",
    Status.NETWORK: "The network's own: it cannot be built or trained in fp32",
    Status.EXPORT: "The export's own",
    Status.ENGINE: "The engine's own: it fails in fp32, or without finecast, too",
}


def _figures(row: Mapping[str, Outcome], stage: str) -> Mapping[str, float]:
    return row[stage].figures if stage in row else {}


def _number(figures: Mapping[str, float], key: str, spec: str = ".2g") -> str:
    return format(figures[key], spec) if key in figures else ""


def _table_head(names: Sequence[str]) -> list[str]:
    return [_line(names), _line(["---"] * len(names))]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _inline(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "/") + "`"
