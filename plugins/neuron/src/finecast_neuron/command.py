"""``finecast ladder``: emulate each rung of a compiler's options, and a plan by op."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finecast.api import Destination
from finecast.cli import (
    Evaluation,
    Json,
    Kept,
    Model,
    Only,
    Trusted,
    Verbatim,
    telling_stale,
    warn,
    warn_stale,
    write_json,
    write_note,
    write_report,
)
from finecast.devices import CastRequest
from finecast.errors import ExitCode
from finecast.files import CommandFiles
from finecast.naming import Option
from finecast.progress import shown
from finecast.reports import output_lines
from finecast_neuron.choice import choose
from finecast_neuron.compilers import NEURON_TARGETS
from finecast_neuron.options import CompilerFlags

if TYPE_CHECKING:
    from finecast import Policy
    from finecast.devices import Emulation
    from finecast_neuron.ladder import LadderOutcome, Rung

_COMPILED = ".neff"
*_OTHERS, _LAST = NEURON_TARGETS
_TARGETS = ", ".join(_OTHERS)

_LadderTarget = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help=f"{_TARGETS} or {_LAST}. Needed, here or by --from-env."
    ),
]
_Compile = Annotated[
    Path | None,
    typer.Option(
        "--compile", metavar="HLO", help="Compile this program with the recommended option."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByOp:
    """The plan that chooses formats op by op, which no rung of the ladder does."""

    per_op: bool = Option(
        help="Also look for a plan that chooses formats op by op.",
        flags=("--per-op/--no-per-op",),
        kind=bool,
    ).field(True)
    auto_cast_type: str | None = Option(
        help="Formats of the plan by op: bf16, fp16, int8 on inf1; default: those of the"
        " options.",
        metavar="FORMAT[,FORMAT]",
    ).field(None)

    def named(self, target: str, device: CompilerFlags) -> tuple[Emulation, Policy] | None:
        """The device, and a policy of the named formats; None if none is named."""
        if self.auto_cast_type is None:
            return None
        request = CastRequest(
            auto_cast="auto", auto_cast_type=self.auto_cast_type, target=target
        )
        given, _ = device.given(request)
        choice = choose(given, sdk=device.sdk, compiler=device.from_env)
        assert choice.emulation is not None
        return choice.emulation, choice.policy


def run(
    model: Model,
    data: Evaluation,
    criterion: Kept,
    device: CompilerFlags,
    by_op: ByOp,
    written: Annotated[Destination, Only("path", "force")],
    how: Trusted,
    target: _LadderTarget = None,
    compile_with: _Compile = None,
    as_json: Json = False,
) -> int:
    """Emulate a compiler with each of its options; recommend the fastest within the limit.

    Times are modelled from the device's data sheet, not measured. Exits with 1 if no option
    is within the limit, and with 3 if --compile compiled nothing.

    Examples:
      finecast ladder m.onnx --target trn1 --data val.npz --metric top1

      finecast ladder m.pt2 --target trn1 --data val.npz --metric top1 -o out.pt2
    """
    from finecast_neuron.api import LadderRequest, walked

    start = time.perf_counter()
    target, rungs, notes = device.ladder(target)
    warn(*notes)
    files = CommandFiles(force=written.force)
    files.read("--compile", compile_with)
    if compile_with is not None:
        files.write("the compiled program", _compiled_name(compile_with))
    request = LadderRequest(
        rungs=rungs,
        data=data,
        criterion=criterion,
        per_op=by_op.per_op,
        formats=by_op.named(target, device),
    )
    with telling_stale(files):
        with shown("ladder") as bar:
            outcome = walked(model, replace(request, progress=bar), written, how, files)
        best = outcome.best
        done, compiled = True, None
        if compile_with is not None and best is not None:
            with files.locked():
                done, compiled = _compile(compile_with, best.rung)
    stale = files.stale() if outcome.plan is None else ()
    warn(*outcome.warnings)
    warn_stale(stale)
    if as_json:
        seconds = time.perf_counter() - start
        more = {"seconds": seconds, "compiled": compiled, "stale": [*map(str, stale)]}
        write_json(outcome.to_dict() | more)
    else:
        write_report(outcome)
        _print_advice(outcome, compiled)
    if not done:
        return ExitCode.FAILED
    return ExitCode.DONE if best is not None and not stale else ExitCode.NOT_IMPROVED


def _print_advice(outcome: LadderOutcome, compiled: str | None) -> None:
    from finecast.data import by_output

    plan, output = outcome.plan, outcome.output
    lines: list[str] = []
    if outcome.best is None:
        lines.append("no option is within the limit: allow more by --max-drop, or run fp32")
    else:
        rung = outcome.best.rung
        command, snippet = Verbatim(f"  {rung.command()}"), Verbatim(f"  {rung.snippet}")
        lines += [f"* recommended: {rung.name}", command, snippet]
        scores = by_output(outcome.best.metric)
        lines += output_lines(outcome.best.errors, outcome.left_out, scores)
    if plan is None:
        lines.append(f"per-op plan: {outcome.why}")
    else:
        ops = ", ".join(f"{n} {fmt}" for fmt, n in plan.plan.counts.items())
        place = f"written to {output}" if output else "give -o to write it"
        lines.append(
            f"per-op plan: x{outcome.slowest_s / plan.time_s:.2f}, metric {plan.metric:.6g}:"
            f" {ops}; {place}; compile it with {outcome.rungs[0].rung.name}"
        )
    if compiled:
        lines.append(Verbatim(compiled))
    for line in lines:
        write_note(line)


def _compile(program: Path, rung: Rung) -> tuple[bool, str]:
    """Run the compiler; returns whether it compiled the program, and a line that says so."""
    compiled = _compiled_name(program)
    name, *words = shlex.split(rung.command(str(program), str(compiled)))
    compiler = shutil.which(name)
    if compiler is None:
        return False, f"not compiled: {name} is not on PATH"
    done = subprocess.run(
        [compiler, *words], check=False, capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        tail = (done.stderr or done.stdout).strip().splitlines()[-1:]
        return False, f"{name} failed with status {done.returncode}: {' '.join(tail)}"
    return True, f"compiled to {compiled}"


def _compiled_name(program: Path) -> Path:
    return program.parent / f"{program.stem}{_COMPILED}"
