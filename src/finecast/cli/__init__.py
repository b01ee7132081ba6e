"""The command line. One verb a file; only the chosen verb's file is imported.

Laws: a failure of the user's making is one line on stderr, ``error: …``, never a traceback;
exit codes are ``errors.ExitCode``, and 130 after Ctrl-C. A verb's module has a function
``run`` that Typer reads the options from, groups of them from dataclasses; its return value
is the exit code.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from inspect import cleandoc
from typing import Annotated, Any

import typer

from finecast.cli.groups import expanded
from finecast.errors import ExitCode, FinecastError

VERBS = {
    "doctor": "What runs on this machine, and how fast each format is.",
    "inspect": "A model's ops by class and type, parameters, FLOPs and bytes.",
    "convert": "Cast a model by a policy, verify and save it.",
    "tune": "Find the fastest mixed precision that keeps your accuracy.",
    "apply": "Apply a saved plan to a model.",
    "explain": "Why a node has its format: every rule's verdict with evidence.",
    "emulate": "What a device you do not have would do to your numbers.",
    "ladder": "A Neuron compiler's ladder of options, each rung emulated.",
    "targets": "The devices that emulate and ladder know.",
    "formats": "Range, precision, strengths and weaknesses of the number formats.",
    "profile": "Latency, throughput, memory and per-op times of models, compared.",
}
"""Verbs and the line each has in ``finecast --help``; a verb's module has its name."""

_INTERRUPTED = 130
_FAST_MATH = "--fast-math"
_COMPLETE = "_FINECAST_COMPLETE"
"""Set by a shell whose user pressed Tab."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = _joined([arg for arg in args if arg != "--debug"]) or ["--help"]
    try:
        command: Any = typer.main.get_command(_app(_completed() or args))
        result = command.main(args=args, prog_name="finecast", standalone_mode=False)
        return int(result) if isinstance(result, int) else ExitCode.DONE
    except FinecastError as error:
        if debug:
            raise
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", _INTERRUPTED)
    except Exception as error:
        # Typer's own errors of usage; which module they live in differs between versions.
        message = getattr(error, "format_message", None)
        if debug or message is None:
            raise
        return _fail(f"{message()} (see finecast {_verb(args) or ''} --help)", ExitCode.USAGE)


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    colour = sys.stderr.isatty()
    label = "\033[1;31merror:\033[0m" if colour else "error:"
    sys.stderr.write(f"{label} {line}\n")
    return int(code)


def _verb(args: Sequence[str]) -> str | None:
    # no global option takes a value, so the first bare word is the verb
    name = next((arg for arg in args if not arg.startswith("-")), None)
    return name if name in VERBS else None


def _joined(args: Sequence[str]) -> list[str]:
    """``--fast-math a b`` as one option with one value, as neuron-cc reads it."""
    if not any(arg.partition("=")[0] == _FAST_MATH for arg in args):
        return list(args)
    from finecast.naming import spelled
    from finecast.neuron.options import FAST_MATH_KEYWORDS

    joined: list[str] = []
    for arg in args:
        last = joined[-1] if joined else ""
        follows = joined[-2:-1] == [_FAST_MATH] or last.startswith(f"{_FAST_MATH}=")
        if follows and spelled(arg) in FAST_MATH_KEYWORDS:
            joined[-1] += f" {arg}"
        else:
            joined.append(arg)
    return joined


def _completed() -> list[str]:
    """The words of the line that a shell asks to complete; none where it does not."""
    if _COMPLETE not in os.environ:
        return []
    # bash hands them over in its own variable, other shells in Typer's
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    return line.split()[1:]


def _app(args: Sequence[str]) -> typer.Typer:
    app = typer.Typer(
        name="finecast",
        help="Fine-grained automatic mixed precision.",
        add_completion=True,
        rich_markup_mode=None,  # importing rich to frame the help would double its time
    )
    app.callback()(_globals)
    chosen = _verb(args)
    for name, line in VERBS.items():
        if name == chosen:
            run = expanded(importlib.import_module(f"finecast.cli.{name}").run)
            app.command(name, help=_help(run.__doc__ or line))(run)
        else:
            app.command(name, help=line)(_placeholder())
    return app


def _help(text: str) -> str:
    """The docstring, with its examples kept as they are written: click's mark for that."""
    words, example, lines = cleandoc(text).partition("Example")
    kept = [f"\b\n{p}" for p in (example + lines).split("\n\n") if p]
    return words + "\n\n".join(kept)


def _placeholder() -> Callable[[], None]:
    def run() -> None:
        """Stands for a verb in the list of verbs; never called."""

    return run


def _print_version(wanted: bool) -> None:
    if wanted:
        from finecast.measure.environment import version_of

        sys.stdout.write(f"finecast {version_of('finecast') or 'unknown'}\n")
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
    """Options before the verb; ``main`` reads --debug anywhere in the line."""
