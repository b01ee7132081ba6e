"""List the terms of finecast's own dialect in messages, help texts and pages.

Each term has what the field calls it. A use that means something else, as code that is run, is
allowed by its words, with the reason. ``python scripts/terms.py`` prints what is left, and a
test holds that there is nothing.
"""

from __future__ import annotations

import ast
import csv
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT = Path(__file__).parent.parent

TERMS: Final[Mapping[str, str]] = {
    r"codes": "quantized integers, quantized",
    r"low|lowered|lowers": "reduced precision, cast down",
    r"rac(?:e|es|ed|ing)": "benchmark",
    r"anchors?": "baseline",
    r"subjects?|examined": "tuning target, analysis",
    r"t(?:ell|ells|elling|old)": "report, log, notice, say",
    r"restat\w+|states(?! of)|stating|stated|(?:can|cannot|could|to|models?) state"
    r"|state (?:it|its|them|the|how|what|short|a plan)": "written, expressed",
    r"tak\w+ (?:it |them )?back|took (?:it |them )?back": "revert",
    r"fall\w* apart|fell apart": "not fused",
    r"price.books?": "timing cache",
    r"locks?|locked": "deployment manifest",
    r"carr(?:y|ies|ied)": "recurrent state, cache",
    r"units?": "precision group",
    r"guests?": "plugin, adapter",
    r"rungs?": "option",
    r"second opinions?": "cross-engine check",
    r"workloads?": "evaluation set",
    r"casts inside": "casts within the plan's ops",
    r"hint alone|over the hint": "the engine's precision hint",
    r"(?:\d+\.\d+|\{\})(?: ?x(?!\{)| times as fast)|\u00d7(?:\d|\{\})": "x1.64",
    r"(?-i:openvino|onnxruntime)(?![.:\w-])": "OpenVINO, ONNX Runtime",
}
"""Patterns of terms, and the words that messages and pages have in their place."""

ALLOWED: Final[Mapping[str, str]] = {
    r"exit[- ]codes?": "the number that a command ends with",
    r"[\w.]*\.lock\.(?:json|npz)|--lock \w+": "the name of a file",
    r"\blow\.(?:onnx|xml|pt2)|\(low,|'low'": "a name in code",
    r"(?:very )?low (?:range|precision)": "less of it, which is said of formats",
    r"unit in the last place": "the field's word for the distance of two numbers",
    r"units? (?:differ|of their own)|(?:own|other|different|several) units?": "of numbers",
    r"pip install \w+|--engine \w+|\w+/\w+/(?:issues|pull)": "a name to type or to look up",
    r"openvino, onnxruntime, |nncf, onnxruntime": "values of an option",
    r"t(?:ell|ells|old) (?:them )?apart|tell a right model from": "to see a difference",
    r"text-anchor|\.anchor|class=\"anchor\"|tuple\[Race": "a name in code",
}
"""Patterns of uses that are not the term, and why."""
SHOWN: Final = frozenset({"title", "left", "right", "notes", "help", "fix", "text", "what"})
"""Names of arguments that are texts for users: heads of tables, help, parts of errors."""
PHASES: Final = frozenset({"progress", "Notice", "reading"})
"""Calls whose first argument is shown: the name of a phase, or of a kind of file."""
TABLES: Final = ("backends.csv", "faults.csv", "foreign.csv")
"""Tables whose cells are parts of messages; ``ops.csv`` has names alone."""
PRINTED: Final = frozenset({"```console", "```text"})
"""Fences around what is printed, or typed and printed."""
INSIDE: Final = (
    *("architecture", "upstream", "testing.md", "conformance.md", "contributing.md"),
    *(
        "adjustments.md",
        "fidelity.md",
        "fusions.md",
        "operators.md",
        "prediction.md",
        "zoo.md",
    ),
)
"""Pages for those who change finecast, which name things as the code does: how it is built and
tested, and records of measurements that scripts write.
"""


@dataclass(frozen=True, slots=True)
class Use:
    """A term in a text."""

    file: Path
    line: int
    term: str
    field: str
    text: str

    def __str__(self) -> str:
        """A line for people."""
        place = f"{self.file.relative_to(ROOT)}:{self.line}"
        return f"{place}: {self.term!r} ({self.field}): {self.text}"


def uses() -> Iterator[Use]:
    """Each use of a term in a message, a help text or a page."""
    for file, line, text in texts():
        plain = re.sub(
            "|".join(ALLOWED) or "(?!)", lambda m: " " * len(m[0]), text, flags=re.I
        )
        for pattern, field in TERMS.items():
            for found in re.finditer(rf"(?<![\w-])(?:{pattern})(?![\w-])", plain, re.I):
                start = max(found.start() - 50, 0)
                around = " ".join(text[start : found.end() + 50].split())
                yield Use(file, line, found[0], field, around)


def texts() -> Iterator[tuple[Path, int, str]]:
    """All that a user may read, with its place."""
    yield from (*messages(), *script_messages(), *table_texts(), *pages())


def messages() -> Iterator[tuple[Path, int, str]]:
    """Texts in the code that have several words, or are shown as they are; no docstrings."""
    for file in _files("*.py"):
        tree = ast.parse(file.read_text())
        parts = {
            id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                parts.add(id(node.value))  # a docstring
        shown = {
            id(n) for call in ast.walk(tree) for part in _shown(call) for n in ast.walk(part)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                told = "".join(
                    str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                told = "" if id(node) in parts else node.value
            else:
                continue
            if " " in told.strip() or id(node) in shown:
                yield file, node.lineno, told


def script_messages() -> Iterator[tuple[Path, int, str]]:
    """Texts of several words in the scripts of the report's page."""
    for file in _files("*.js"):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            for quoted in re.finditer(r"""(["'`])(.*?)\1""", line.partition(" // ")[0]):
                told = re.sub(r"\$\{[^}]*\}", "{}", quoted[2])
                if " " in told.strip():
                    yield file, number, told


def _files(pattern: str) -> Iterator[Path]:
    for folder in (ROOT / "src", *sorted((ROOT / "plugins").glob("*/src"))):
        yield from sorted(folder.rglob(pattern))


def _shown(node: ast.AST) -> Iterator[ast.expr]:
    """The arguments of a call that are texts for users, however short."""
    if isinstance(node, ast.Call):
        yield from (part.value for part in node.keywords if part.arg in SHOWN)
        if isinstance(node.func, ast.Name | ast.Attribute) and node.args:
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in PHASES:
                yield node.args[0]


def table_texts() -> Iterator[tuple[Path, int, str]]:
    """Cells of several words in the tables that messages are read from; no comments."""
    for name in TABLES:
        for file in _files(name):
            for number, line in enumerate(file.read_text().splitlines(), 1):
                cells = [] if line.startswith("#") else next(csv.reader([line]), [])
                yield from ((file, number, cell) for cell in cells if " " in cell.strip())


def pages() -> Iterator[tuple[Path, int, str]]:
    """Lines of pages without their code; what commands print is none."""
    pages = ROOT / "docs"
    own = (
        f for f in sorted(pages.rglob("*.md")) if f.relative_to(pages).parts[0] not in INSIDE
    )
    others = (*sorted(ROOT.glob("plugins/*/README.md")), *sorted(ROOT.glob("examples/*/*.md")))
    for file in (ROOT / "README.md", *own, *others):
        fence = ""
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if line.lstrip().startswith("```"):
                fence = "" if fence else line.strip()
            elif fence and (fence not in PRINTED or line.startswith(("$ ", "    --"))):
                continue
            elif fence or not line.startswith("    "):
                plain = re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", " ", line)
                yield file, number, plain


if __name__ == "__main__":
    found = list(uses())
    print("\n".join(map(str, found)))
    sys.exit(1 if found else 0)
