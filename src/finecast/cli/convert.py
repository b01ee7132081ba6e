"""``finecast convert``: cast a model by a policy, verify it, save it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from finecast.cli.common import (
    EngineName,
    Json,
    NoVerify,
    Output,
    PlanOut,
    Source,
    files_of,
    open_model,
    telling_stale,
)
from finecast.cli.data_options import Data, RandomFeeds
from finecast.cli.output import Verbatim, add_row, new_table, warn, write_json, write_table
from finecast.cli.policy_options import Casting, Device, Narrowing, Target
from finecast.files import write_text
from finecast.progress import shown

if TYPE_CHECKING:
    from finecast.pipeline.artefact import Verified
    from finecast.pipeline.conversion import Conversion

Clean = Annotated[
    bool,
    typer.Option(
        "--clean",
        help="Leave out what no output needs and came so: nodes, initializers, functions.",
    ),
]
_MOST_LINES: Final = 8


def run(
    source: Source,
    written: Output,
    casting: Casting,
    narrowing: Narrowing,
    data: Data,
    feeds: RandomFeeds,
    device: Device,
    target: Target = None,
    engine: EngineName = None,
    plan_out: PlanOut = None,
    no_verify: NoVerify = False,
    clean: Clean = False,
    as_json: Json = False,
) -> None:
    """Cast a model by a policy, verify and save it.

    Casts stand where they serve most ops, constants are converted ahead of time, input and
    output types are kept. Nothing is written unless the model is valid and runs; with
    --target the emulator of that device runs it. Data guides the rules and verifies.

    Without --auto-cast finecast chooses by op. The compilers' options (--fast-math, --sdk,
    --from-env) lower what the compiler would, by casts in the model. ONNX has no tf32:
    arithmetic in fp32 states it, for its numbers; its speed is the compiler's to give.

    MODEL may be torch.export's .pt2, a SavedModel, or what OpenVINO reads: that gives .xml.

    Examples:
      finecast convert m.onnx -o low.onnx --auto-cast all --auto-cast-type bf16

      finecast convert m.onnx -o low.onnx --op Softmax=fp32 --exclude 'head/.*'

      finecast convert m.onnx -o low.onnx --target trn1 --auto-cast-type fp8_e4m3

      finecast convert m.pt2 -o low.pt2 --auto-cast all --auto-cast-type bf16
    """
    from finecast import api

    choice = narrowing.narrowed(device.choice(casting, target))
    files = files_of(source.model, data, narrowing, force=written.force)
    files.write("--plan-out", plan_out)
    with (
        telling_stale(files),
        shown("converting", quiet=as_json) as told,
        files.locked() as removed,
    ):
        _warn_of(removed)
        result = api.convert(
            open_model(files, source, written, engine=engine, data=data, feeds=feeds),
            written.output,
            choice.policy,
            engine=engine,
            target=choice.emulation,
            data=data.if_given(),
            dims=feeds.sizes,
            user_rules=narrowing.user_rules(),
            verify=not no_verify,
            force=written.force,
            external_data=written.external_data,
            clean=clean,
            from_type=source.from_type,
            progress=told,
        )
        if plan_out is not None:
            write_text(plan_out, result.plan.to_json())
    _warn_of(choice.told(set(result.plan.formats.values())))
    report(result, written.output, as_json=as_json)


def _warn_of(notes: Iterable[str]) -> None:
    for note in notes:
        warn(note)


def report(result: Conversion, output: Path, *, as_json: bool) -> None:
    """Print what a conversion did, and how it was verified."""
    _warn_of(result.warnings)
    if as_json:
        write_json(to_dict(result, output))
        return
    verified = result.verified
    table = new_table(str(output), ("", "value"), fold="value")
    rows = [
        ("ops", ", ".join(f"{n} {fmt}" for fmt, n in result.ops.items()) or "none"),
        ("casts inside", str(result.casts)),
        ("size", " -> ".join(f"{b / 1e6:.2f} MB" for b in result.size_bytes)),
        *([("opset", str(result.plan.opset))] if result.plan.opset else []),
        *_listed("restated", result.restated),
        *(("adjusted", gain.text) for gain in result.gains if gain.gains),
        ("verified in", (verified.engine or "nothing") + _sizes(verified.sizes)),
        *_kernels(verified),
        (f"error against {verified.reference}", _errors(result) or verified.note),
        ("time", f"{result.seconds:.2f} s"),
    ]
    for name, value in rows:
        add_row(table, name, value)
    write_table(table, *_run_by_hint(result, output))


def _run_by_hint(result: Conversion, output: Path) -> list[str]:
    """How a model is run that computes as planned under an engine's hint alone."""
    from finecast.engines.usage import how_to_run

    plan = result.plan
    if not (plan.by_hint and plan.lowers):
        return []
    return [Verbatim(how_to_run(output, plan.engine, result.ops, by_hint=True))]


def _kernels(verified: Verified) -> list[tuple[str, str]]:
    """Rows: the number of kernels before and after, and kernels that now run as several."""
    if verified.kernels is None:
        return []
    before, after = verified.kernels
    return [("kernels", f"{before} -> {after}"), *_listed("fallen apart", verified.apart)]


def _listed(name: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    """A row for each of the first lines; only the first row shows the name."""
    more = len(lines) - _MOST_LINES
    shown = [
        *lines[:_MOST_LINES],
        *([f"and {more} more: --json lists all"] if more > 0 else []),
    ]
    return [("" if number else name, line) for number, line in enumerate(shown)]


def _sizes(sizes: Mapping[str, int]) -> str:
    return "".join(f", {name}={size}" for name, size in sizes.items())


def _errors(result: Conversion) -> str:
    found = result.verified
    if found.relative_error is None or found.max_abs_error is None:
        return ""
    note = f"; {found.note}" if found.note else ""
    of = f" ({next(iter(found.outputs))})" if len(found.outputs) > 1 else ""
    text = f"relative {found.relative_error:.3g}{of}, largest {found.max_abs_error:.3g}"
    taken = found.taken_error
    alone = "" if taken is None else f"; of it by fp32 alone relative {taken:.3g}"
    drawn = ", on random inputs" if found.random else ""
    return f"{text}{drawn}{alone}{note}"


def to_dict(result: Conversion, output: Path) -> dict[str, Any]:
    """The report as JSON."""
    before, after = result.size_bytes
    return {
        "output": str(output),
        "nodes": result.nodes,
        "ops": result.ops,
        "casts": result.casts,
        "by_hint": result.plan.by_hint,
        "opset": result.plan.opset,
        "size_bytes": {"before": before, "after": after},
        "seconds": result.seconds,
        "verified": {
            "engine": result.verified.engine,
            "max_abs_error": result.verified.max_abs_error,
            "relative_error": result.verified.relative_error,
            "outputs": dict(result.verified.outputs),
            "reference": result.verified.reference,
            "taken_error": result.verified.taken_error,
            "sizes": dict(result.verified.sizes),
            "random_inputs": result.verified.random,
            "kernels": result.verified.kernels,
            "fallen_apart": list(result.verified.apart),
            "note": result.verified.note,
        },
        "restated": list(result.restated),
        "adjustments": [gain.to_dict() for gain in result.gains],
        "warnings": list(result.warnings),
    }
