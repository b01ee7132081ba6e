"""The source keeps the shape that docs/architecture.md describes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "finecast"
LONGEST_FILE = 400
MOST_AT_THE_TOP = 8


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE), ast.parse(path.read_text(encoding="utf-8"))


def test_few_modules_stand_outside_of_rooms() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= MOST_AT_THE_TOP


def test_no_two_public_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path))
    assert {name: of for name, of in homes.items() if len(of) > 1} == {}


def test_files_stay_short() -> None:
    sizes = {p: len((SOURCE / p).read_text(encoding="utf-8").splitlines()) for p, _ in trees()}
    assert {str(p): n for p, n in sizes.items() if n > LONGEST_FILE} == {}
