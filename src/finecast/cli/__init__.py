"""The command line. One verb a module; only the chosen verb's module is imported.

Laws: a failure of the user's making is one line on stderr, ``error: …``, never a traceback;
with ``--json`` stdout has it as well, as ``{"error": {what, where, fix, exit_code}}``. Exit
codes are ``errors.ExitCode``. A verb's module has a function ``run``: Typer reads the options
from its parameters (see ``groups``), and its return value is the exit code.
"""

from __future__ import annotations

import faulthandler
import functools
import math
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from finecast.cli.groups import expanded
from finecast.cli.output import warn, write_error, write_json
from finecast.cli.panels import PanelledCommand, helping
from finecast.errors import (
    ExitCode,
    FinecastError,
    InterruptedRunError,
    UsageError,
    UserCodeError,
)
from finecast.files.locks import release_all
from finecast.naming import plain_dashes
from finecast.plugin import (
    Verb,
    absent_plugins,
    failures,
    imported_on_use,
    load,
    plugins,
    verbs,
)
from finecast.processes.memory import limit_error, reserve_memory
from finecast.terminal import claim_standard_output, prints_to, results, safe, write

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.cli.common import Evaluation as Evaluation
    from finecast.cli.common import Json as Json
    from finecast.cli.common import Kept as Kept
    from finecast.cli.common import Model as Model
    from finecast.cli.common import Trusted as Trusted
    from finecast.cli.common import telling_stale as telling_stale
    from finecast.cli.common import warn_stale as warn_stale
    from finecast.cli.groups import Only as Only
    from finecast.cli.output import Verbatim as Verbatim
    from finecast.cli.output import write_note as write_note
    from finecast.cli.output import write_report as write_report
else:
    __getattr__ = imported_on_use(__name__)

VERBS: Final[Mapping[str, Verb]] = verbs()
"""Verbs by name: those of the core, then those of plugins."""

# A word of an option that takes several: no option, and no path with a suffix or folder.
_KEYWORD = re.compile(r"\w[\w-]*")
_COMPLETE = "_FINECAST_COMPLETE"
"""Environment variable that the shell sets when its user pressed Tab."""
# The file name that stack frames of Python's import machinery have.
_IMPORT_MACHINERY = "<frozen importlib._bootstrap>"
# Ctrl-C; ``kill``, ``timeout`` and batch systems; a terminal that was closed.
_ENDING = ("SIGINT", "SIGTERM", "SIGHUP")
# After the first signal it takes less than this to end processes and to say what is kept.
_PATIENCE_S = 3.0
# What may come of a limit of memory or of open files, whatever the error says.
_FAILURES = (ExitCode.FAILED, ExitCode.USAGE)
# What shells report of a program ended by SIGPIPE, as in ``finecast formats | head -1``.
_NO_READER = 128 + 13


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [plain_dashes(arg) for arg in args if arg != "--debug"]
    args = _joined(args) or ["--help"]
    reserve = None
    try:
        reserve = reserve_memory()
        _refuse_empty(args)
        warn(*failures())
        return _run(args)
    except SystemExit as error:
        # Typer has answered a shell's request for completions, or a pipe has no reader.
        if isinstance(error.__context__, BrokenPipeError):
            return _NO_READER
        raise
    except BrokenPipeError:
        return _NO_READER
    except (Exception, KeyboardInterrupt) as error:
        if reserve is not None:
            reserve.close()
        shown = _shown(error, _verb(args))
        if shown is None or (debug and not isinstance(shown, InterruptedRunError)):
            raise
        return _fail(shown, as_json="--json" in args)


def _run(args: Sequence[str]) -> int:
    command: Any = typer.main.get_command(_app(_completed() or args))
    answer = StringIO()  # Typer prints help and completions
    try:
        with prints_to(answer):
            result = command.main(args=args, prog_name="finecast", standalone_mode=False)
    finally:
        if answer.getvalue():
            write(results(), answer.getvalue(), end="")
    if result == ExitCode.INTERRUPTED:  # all that Typer leaves of Ctrl-C
        raise KeyboardInterrupt
    return int(result) if isinstance(result, int) else ExitCode.DONE


def entry() -> int:
    """``main`` as a process: a bug of finecast's prints its traceback and exits with ``BUG``.

    Where an engine crashes the process (a segmentation fault in its compiler), the Python
    stack is printed to stderr, and the process still dies of the signal.
    """
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__, all_threads=False)
    claim_standard_output()
    interrupts = Interrupts()
    before = {number: signal.signal(number, interrupts.handle) for number in _handled()}
    try:
        return main()
    except Exception:
        for line in traceback.format_exc().splitlines():
            write(sys.stderr, safe(line))
        return ExitCode.BUG
    finally:
        for number, handler in before.items():
            # Python's own would end the process by the signal while it joins its threads.
            signal.signal(number, signal.SIG_IGN if interrupts.came else handler)


def _handled() -> list[signal.Signals]:
    """Signals that end a command as Ctrl-C does; not those that its parent ignores (nohup)."""
    named = [getattr(signal, name, None) for name in _ENDING]
    ignored = (signal.SIG_IGN, None)
    return [n for n in named if n is not None and signal.getsignal(n) not in ignored]


@dataclass(slots=True)
class Interrupts:
    """Handles Ctrl-C, and other signals alike.

    Laws: the first one raises KeyboardInterrupt, and those that follow while it is handled do
    nothing: people press several times. One that comes so late that the first was of no effect
    ends the process at once, as code of the user's may have caught that. So does the first if
    a module is being imported: extension modules would print a traceback of KeyboardInterrupt
    and report that an import failed.
    """

    handled_s: float = math.inf

    @property
    def came(self) -> bool:
        """Whether there was one."""
        return self.handled_s < math.inf

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle one signal."""
        now_s = time.monotonic()
        if self.came and now_s < self.handled_s + _PATIENCE_S:
            return
        at_once, self.handled_s = self.came, now_s
        while frame is not None and not at_once:
            at_once = frame.f_code.co_filename == _IMPORT_MACHINERY
            frame = frame.f_back
        if not at_once:
            raise KeyboardInterrupt
        end_interrupted()


def end_interrupted() -> NoReturn:
    """Report Ctrl-C and end the process without waiting for its threads."""
    code = _fail(_interrupted(), as_json="--json" in sys.argv)
    release_all()
    results().flush()
    sys.stderr.flush()
    os._exit(code)


def _interrupted() -> FinecastError:
    return InterruptedRunError("interrupted", fix="nothing half-written is left")


def _shown(error: BaseException, verb: str | None) -> FinecastError | None:
    """The error that the user is shown for an exception; None if it is a bug of finecast's."""
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return _interrupted()
    if isinstance(error, FinecastError):
        return (limit_error(error) if error.exit_code in _FAILURES else None) or error
    # Typer's usage errors, told by a method: versions define them in different modules.
    message = getattr(error, "format_message", None)
    if message is None:
        return limit_error(error)
    command = f"finecast {verb}" if verb else "finecast"
    return UsageError(message().rstrip("."), fix=f"see {command} --help{absent_plugins()}")


def _fail(error: FinecastError, *, as_json: bool) -> int:
    code = int(error.exit_code)
    try:
        if as_json:
            parts = {"what": error.what, "where": error.where, "fix": error.fix}
            write_json({"error": {**parts, "exit_code": code}})
    except UsageError as unprinted:  # standard output is full
        write_error(unprinted.line)
    except BrokenPipeError:
        return _NO_READER
    write_error(error.line)
    return code


def _verb(args: Sequence[str]) -> str | None:
    # No global option takes a value, so the first word without a dash is the verb.
    name = next((arg for arg in args if not arg.startswith("-")), None)
    return name if name in VERBS else None


def _refuse_empty(args: Sequence[str]) -> None:
    """Raise UsageError for an empty argument: as a path it would be the current folder."""
    for before, arg in zip(("", *args), args, strict=False):
        if not arg:
            raise UsageError(
                "the value is empty" if before.startswith("-") else "an argument is empty",
                where=before,
                fix="give one, or leave it out; a variable of the shell may be unset",
            )


def _joined(args: Sequence[str]) -> list[str]:
    """``--fast-math a b`` as one option with one value, as its compiler reads it.

    Misspelt keywords belong to the value, too, so that the error lists the right ones.
    """
    several = {o for p in plugins() for group in p.options for o in group.several}
    joined: list[str] = []
    for arg in args:
        name, equals, _ = (joined[-1] if joined else "").partition("=")
        follows = (joined[-2:-1] and joined[-2] in several) or (equals and name in several)
        if follows and _KEYWORD.fullmatch(arg.strip()) and not Path(arg).exists():
            joined[-1] += f" {arg}"
        else:
            joined.append(arg)
    return joined


def _completed() -> list[str]:
    """Words of the command line that a shell asks to complete; none if no shell asks."""
    if _COMPLETE not in os.environ:
        return []
    # bash passes the line in its own variable, other shells in Typer's.
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    return line.split()[1:]


def command(verb: str) -> Any:
    """Typer's command of a verb: its help and its parameters."""
    group: Any = typer.main.get_command(_app([verb]))
    return group.commands[verb]


def _app(args: Sequence[str]) -> typer.Typer:
    app = typer.Typer(
        name="finecast",
        help="Fine-grained automatic mixed precision.",
        add_completion=True,
        rich_markup_mode=None,  # importing rich to frame the help would double its time
    )
    app.callback()(_globals)
    chosen = _verb(args)
    for name, verb in VERBS.items():
        if name == chosen:
            run = helping(expanded(load(f"{verb.module}:run"), name))
            words = _help(run.__doc__ or verb.summary)
            app.command(name, cls=PanelledCommand, help=words)(_shielded(run))
        else:
            app.command(name, help=verb.summary)(_placeholder())
    return app


def _shielded(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, where code of a model or a package neither exits nor prints to stdout."""

    @functools.wraps(run)
    def call(**given: Any) -> Any:
        try:
            with prints_to(sys.stderr):
                return run(**given)
        except SystemExit as error:
            raise UserCodeError(f"something called sys.exit({error.code!r})") from error

    return call


def _help(text: str) -> str:
    """The docstring, with its examples marked so that click does not wrap their lines."""
    words, example, lines = cleandoc(text).partition("Example")
    kept = [f"\b\n{p}" for p in (example + lines).split("\n\n") if p]
    return words + "\n\n".join(kept)


def _placeholder() -> Callable[[], None]:
    def run() -> None:
        """Stand in for a verb in the list of verbs; never called."""

    return run


def _print_version(wanted: bool) -> None:
    if wanted:
        from finecast import __version__

        sys.stdout.write(f"finecast {__version__}\n")
        raise typer.Exit


def _globals(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback on errors.")
    ] = False,
) -> None:
    """Options before the verb; ``main`` itself reads --debug, wherever it stands."""
