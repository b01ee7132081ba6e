"""The source keeps the shape that docs/architecture.md describes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "finecast"
LONGEST_FILE = 400
LONGEST_FUNCTION = 60
MOST_PARAMETERS = 7
MOST_AT_THE_TOP = 8
# Typer reads the options of a verb from its ``run``; users write these functions' keywords.
KEYWORDS = {
    *(f"api.py:{verb}" for verb in ("apply", "convert", "inspect", "tune")),
    "torch/tuning.py:tune",
}


# These still take what a dataclass of options would.
PLANNING = {"planning/assign.py:make_plan", "planning/choices.py:choices"}


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE), ast.parse(path.read_text(encoding="utf-8"))


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.as_posix()}:{node.name}", node


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of all but ``self`` and ``cls``."""
    given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return [a.arg for a in given if a.arg not in ("self", "cls")]


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


def test_functions_stay_short() -> None:
    lines = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in functions()}
    assert {name: n for name, n in lines.items() if n > LONGEST_FUNCTION} == {}


def test_functions_take_few_parameters() -> None:
    counts = {name: len(parameters(node)) for name, node in functions()}
    many = {name for name, count in counts.items() if count > MOST_PARAMETERS}
    verbs = {name for name in many if name.startswith("cli/") and name.endswith(":run")}
    assert many - verbs <= KEYWORDS | PLANNING
    assert many >= KEYWORDS  # none is listed for nothing
