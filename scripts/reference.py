"""Write the reference pages of the documentation that the code itself knows.

``docs/reference/cli.md`` comes from the options of every verb, ``docs/reference/targets.md``
from the targets' files. A test holds the pages to what this script writes; after a change run
``python scripts/reference.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

import typer

from finecast.cli import VERBS, command
from finecast.cli.panels import HELP_ALL, plain_value
from finecast.devices.targets import Target, list_targets, load_target, products_of

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
WRITTEN = "<!-- Written by `python scripts/reference.py`: edit the help texts in the code. -->"
COMMAND_LINE = """\
Each verb prints its part of this page by `finecast VERB --help-all`, and the usual options by
`--help`. With `--json` a verb prints one JSON document on standard output in place of tables.
[Exit codes](exit-codes.md) and [environment variables](environment.md) have pages of their
own."""
TARGETS = """\
The devices that `--target` takes, in `tune`, `convert`, `emulate` and `ladder`. Their facts
are documented rates, each with its source in a file of `src/finecast/devices/targets/`.
`finecast targets NAME` prints one in full."""


def main() -> None:
    """Write both pages."""
    for name, text in pages().items():
        (REFERENCE / name).write_text(text)


def pages() -> dict[str, str]:
    """The text of each page by its file's name."""
    return {"cli.md": command_line(), "targets.md": targets()}


def command_line() -> str:
    """The page on the command line: a section a verb, a row an option."""
    parts = [
        "# Command line",
        WRITTEN,
        COMMAND_LINE,
        _table(
            ("verb", "what it does"), [(f"[{v}](#{v})", e.summary) for v, e in VERBS.items()]
        ),
    ]
    for verb in VERBS:
        parts += _verb(verb)
    return "\n\n".join(parts) + "\n"


def _verb(verb: str) -> list[str]:
    found = command(verb)
    context = typer.Context(found, info_name=verb)
    text, examples = _help(found.help)
    records = [p.get_help_record(context) for p in found.params if p.name != HELP_ALL]
    arguments = [name for name, _ in records if not name.startswith("-")]
    rows = [(f"`{_cell(plain_value(name))}`", _cell(meaning)) for name, meaning in records]
    parts = [
        f"## {verb}",
        text,
        "```text\n"
        + " ".join(("finecast", verb, "[OPTIONS]", *map(plain_value, arguments)))
        + "\n```",
        _table(("option", "meaning"), rows),
    ]
    if examples:
        parts.append("```text\n" + "\n".join(examples) + "\n```")
    return parts


def _help(text: str) -> tuple[str, list[str]]:
    """A verb's description as paragraphs, and the lines of its examples."""
    paragraphs = [p.replace("\b", "").strip("\n") for p in text.split("\n\n")]
    prose = [p for p in paragraphs if not p.lstrip().startswith(("Example", "finecast "))]
    lines = [
        line.strip()
        for p in paragraphs
        if p not in prose
        for line in re.sub(r"\\\n *", "", p).splitlines()
        if line.strip() and not line.startswith("Example")
    ]
    return "\n\n".join(" ".join(p.split()) for p in prose), lines


def targets() -> str:
    """The page on targets: a row each."""
    rows = [_target(load_target(name)) for name in list_targets()]
    return (
        "\n\n".join(
            (
                "# Targets",
                WRITTEN,
                TARGETS,
                _table(("name", "device", "products, TFLOPS", "memory, GB/s"), rows),
            )
        )
        + "\n"
    )


def _target(target: Target) -> tuple[str, ...]:
    rates = {
        f.label: rate
        for spec in target.engines.values()
        for f, rate in spec.rates_tflops.items()
        if spec is next(iter(target.engines.values()))
    }
    return (
        ", ".join(f"`{name}`" for name in (target.name, *products_of(target.name))),
        target.description,
        ", ".join(f"{label} {rate:g}" for label, rate in rates.items()),
        f"{target.bandwidth_gb_s:g}",
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
