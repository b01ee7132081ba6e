"""Lines and files of the package, by room.

    python scripts/lines.py            # of this tree
    python scripts/lines.py --rev REV  # of a commit, to compare with

Counts every line of Python under ``src/finecast``, and of these the lines of code: without
blank lines, comments and docstrings.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import tokenize
from collections import defaultdict
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "src/finecast"
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}

_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sources(rev: str) -> dict[str, bytes]:
    """Content of each module by its path below the package; without a rev as it is now."""
    if not rev:
        root = ROOT / PACKAGE
        return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*.py")}
    listed = _git("ls-tree", "-r", "--name-only", rev, PACKAGE).decode().splitlines()
    return {
        path.removeprefix(f"{PACKAGE}/"): _git("show", f"{rev}:{path}")
        for path in listed
        if path.endswith(".py")
    }


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
        room = path.partition("/")[0] if "/" in path else "(top)"
        counts = (1, len(source.splitlines()), lines_of_code(source))
        for name in (room, "sum"):
            rooms[name] = [a + b for a, b in zip(rooms[name], counts, strict=True)]
    print(f"{'room':14} {'files':>6} {'lines':>7} {'code':>7}")
    for room in (*sorted(rooms.keys() - {"sum"}), "sum"):
        files, lines, code = rooms[room]
        print(f"{room:14} {files:6} {lines:7} {code:7}")


def _git(*arguments: str) -> bytes:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True
    ).stdout


if __name__ == "__main__":
    main()
