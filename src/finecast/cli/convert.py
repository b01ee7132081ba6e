"""``finecast convert``: cast a model by a policy, verify it, save it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from finecast.cli.common import (
    ComparedSamples,
    Json,
    Model,
    Read,
    Run,
    WrittenWithPlan,
    telling_stale,
)
from finecast.cli.output import Verbatim, add_row, new_table, warn, write_json, write_table
from finecast.cli.policy_options import (
    Casting,
    Narrowing,
    OfDevice,
    Ranges,
    Rules,
    Target,
    narrowed,
    rule_files,
    user_rules,
)
from finecast.devices.choice import choose
from finecast.files import CommandFiles
from finecast.naming import left_out, number_of, percent
from finecast.plugin import title_of
from finecast.progress import shown

if TYPE_CHECKING:
    from finecast.native.artefact import Verified
    from finecast.tuning.result import Result

_MOST_LINES: Final = 8


def run(
    model: Model,
    how: Read,
    written: WrittenWithPlan,
    casting: Casting,
    narrowing: Narrowing,
    ranges: Ranges,
    rules: Rules,
    data: ComparedSamples,
    device: OfDevice,
    running: Run,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Convert a model to reduced precision by rules, verify and save it.

    Types of inputs and outputs are kept. Nothing is written unless the model is valid and
    runs; with --target the device's emulator runs it. --data calibrates and verifies. Without
    --auto-cast finecast chooses by op. A compiler's options (--fast-math, --from-env) cast
    the ops that the compiler casts.

    Examples:
      finecast convert m.onnx -o bf16.onnx --auto-cast all --auto-cast-type bf16

      finecast convert m.onnx -o mixed.onnx --op Softmax=fp32 --exclude 'head/.*'

      finecast convert m.pt2 -o fp8.pt2 --target trn1 --auto-cast-type fp8_e4m3
    """
    from finecast import api

    choice = narrowed(choose(casting.request(target), device), narrowing, ranges)
    files = CommandFiles(force=written.force)
    files.read("--rules", *rule_files(rules))
    with telling_stale(files), shown("converting") as bar:
        run = replace(api.on_data(running, data), device=choice.emulation, progress=bar)
        run = replace(run, user_rules=user_rules(rules))
        result = api.converted(model, written, choice.policy, run, how, files)
    warn(*choice.told(set(result.plan.formats.values())))
    report(result, as_json=as_json)


def report(result: Result, *, as_json: bool) -> None:
    """Print what a conversion did, and how it was verified."""
    warn(*result.warnings)
    if as_json:
        write_json(result.to_dict())
        return
    verified = result.verified
    table = new_table(str(result.output), ("", "value"), fold="value")
    rows = [
        ("ops", ", ".join(f"{n} {fmt}" for fmt, n in result.counts.items()) or "none"),
        ("casts between ops", str(result.casts)),
        *(("", text) for text in result.plan.declared),
        ("size", " -> ".join(f"{b / 1e6:.2f} MB" for b in result.size_bytes)),
        *([("opset", _opset(result))] if result.plan.opset else []),
        *_listed("rewritten", result.restated),
        *(("adjusted", gain.text) for gain in result.gains if gain.gains),
        ("verified in", title_of(verified.engine or "nothing") + _sizes(verified.sizes)),
        *_kernels(verified),
        (f"error against {verified.reference}", _errors(verified) or verified.note),
        *_listed("decisions", verified.decided),
        ("time", f"{result.seconds:.2f} s"),
    ]
    for name, value in rows:
        add_row(table, name, value)
    by_hint = result.plan.by_hint and result.plan.lowers
    code = map(Verbatim, result.run_notes)
    notes = (
        []
        if result.lock is None
        else [f"deployment manifest, for finecast verify: {result.lock}"]
    )
    write_table(table, *notes, *(("run it in Python:", *code) if by_hint else ()))


def _opset(result: Result) -> str:
    """The file's opset, and that another engine does not run the file."""
    from finecast.engines.usage import NO_BF16
    from finecast.numbers.formats import Format

    lacking = f"; {NO_BF16}" if Format.BF16.label in result.counts else ""
    return f"{result.plan.opset}{lacking}"


def _kernels(verified: Verified) -> list[tuple[str, str]]:
    """Rows: the number of kernels before and after, and kernels that now run as several."""
    if verified.kernels is None:
        return []
    before, after = verified.kernels
    return [("kernels", f"{before} -> {after}"), *_listed("not fused", verified.apart)]


def _listed(name: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    """A row for each of the first lines; only the first row shows the name."""
    more = left_out(len(lines), _MOST_LINES, ": --json lists all")
    shown = enumerate([*lines[:_MOST_LINES], *more])
    return [("" if number else name, line) for number, line in shown]


def _sizes(sizes: Mapping[str, int]) -> str:
    return "".join(f", {name}={size}" for name, size in sizes.items())


def _errors(found: Verified) -> str:
    if found.relative_error is None or found.max_abs_error is None:
        return ""
    note = f"; {found.note}" if found.note else ""
    text = (
        f"relative {percent(found.relative_error)}, largest absolute {found.max_abs_error:.3g}"
    )
    if len(found.outputs) > 1:
        text += f" (both of {next(iter(found.outputs))}"
        off, name = max((error, name) for name, error in found.largest.items())
        text += f", absolute of {name} {off:.3g})" if off > found.max_abs_error else ")"
    taken = found.taken_error
    alone = "" if taken is None else f"; of it by fp32 alone relative {percent(taken)}"
    on = ", on random inputs" if found.random else ""
    if found.decisions and not found.random:  # which are of more samples
        on = f", on the first {number_of(found.samples, 'sample')}"
    return f"{text}{on}{alone}{note}"
