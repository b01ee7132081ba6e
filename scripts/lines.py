"""Lines and files of the core, by room, and of each plugin.

    python scripts/lines.py            # of this tree
    python scripts/lines.py --rev REV  # of a commit, to compare with

Counts every line of Python under ``src/finecast`` and ``plugins/*/src``, and of these the
lines of code: without blank lines, comments and docstrings.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import tokenize
from collections import defaultdict
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACES = re.compile(r"src/finecast/((?P<room>[^/]+)/)?.*|plugins/(?P<plugin>[^/]+)/src/.*")
CORE, PLUGINS, SUM = "core", "plugins", "sum"
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}

_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sources(rev: str) -> dict[str, bytes]:
    """Content of each module by its path; without a rev as it is now."""
    if not rev:
        paths = [p for top in ("src", "plugins") for p in (ROOT / top).rglob("*.py")]
        return {p.relative_to(ROOT).as_posix(): p.read_bytes() for p in paths}
    listed = _git("ls-tree", "-r", "--name-only", rev, "src", "plugins").decode().splitlines()
    return {path: _git("show", f"{rev}:{path}") for path in listed if path.endswith(".py")}


def rooms_of(path: str) -> tuple[str, ...]:
    """The rows that a module counts in; none if it is no source."""
    place = PLACES.fullmatch(path)
    if place is None:
        return ()
    if place["plugin"]:
        return (f"plugins/{place['plugin']}", PLUGINS, SUM)
    return (place["room"] or "(top)", CORE, SUM)


def lines_of_code(source: bytes) -> int:
    """Lines that hold code: neither blank, nor a comment, nor part of a docstring."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                prose |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.tokenize(BytesIO(source).readline):
        if token.type not in _NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - prose)


def main() -> None:
    """Print a table of the rooms, and the sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rev", default="", help="a commit; without one the working tree")
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for path, source in sources(parser.parse_args().rev).items():
        counts = (1, len(source.splitlines()), lines_of_code(source))
        for name in rooms_of(path):
            rooms[name] = [a + b for a, b in zip(rooms[name], counts, strict=True)]
    print(f"{'room':25} {'files':>6} {'lines':>7} {'code':>7}")
    sums = (CORE, PLUGINS, SUM)
    for room in (*sorted(rooms.keys() - {*sums}), *sums):
        files, lines, code = rooms[room]
        print(f"{room:25} {files:6} {lines:7} {code:7}")


def _git(*arguments: str) -> bytes:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True
    ).stdout


if __name__ == "__main__":
    main()
