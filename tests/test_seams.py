"""Plugins import public modules alone, and each room states what these import of it."""

from __future__ import annotations

import ast
import importlib
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
TOY = ROOT / "tests" / "toy_plugin"
ROOMS = {
    ".".join(path.parent.relative_to(SOURCE).parts): path
    for path in SOURCE.rglob("__init__.py")
    if "imported_on_use(__name__)" in path.read_text(encoding="utf-8")
}


def public() -> set[str]:
    """The modules that the contract of import-linter lets plugins import."""
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = stated["tool"]["importlinter"]["contracts"]
    (seams,) = (one for one in contracts if one["id"] == "seams")
    return {line.removeprefix("** -> ") for line in seams["ignore_imports"]}


def is_module(name: str) -> bool:
    path = SOURCE.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Modules of finecast that a file imports, for type checkers too, and names of them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((one.name, "") for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                whole = f"{node.module}.{one.name}"
                yield (whole, "") if is_module(whole) else (node.module, one.name)


def of_plugins() -> set[tuple[str, str]]:
    sources = [*ROOT.glob("plugins/*/src/**/*.py"), *TOY.rglob("*.py")]
    found = {one for path in sources for one in imports(path)}
    return {(m, name) for m, name in found if m.partition(".")[0] == "finecast"}


def stated(room: str) -> dict[str, str]:
    """What a room states for others: each name with its ``module:attribute``."""
    blocks = ast.parse(ROOMS[room].read_text(encoding="utf-8")).body
    lines = [line for block in blocks if isinstance(block, ast.If) for line in block.body]
    return {
        one.asname: f"{line.module}:{one.name}"
        for line in lines
        if isinstance(line, ast.ImportFrom)
        for one in line.names
        if one.asname
    }


def test_plugins_import_public_modules_alone() -> None:
    """Import-linter does not see imports for type checkers, nor the toy."""
    assert {module for module, _ in of_plugins()} <= public()


def test_every_public_module_is_one() -> None:
    assert [name for name in public() if not is_module(name)] == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_gives_the_names_that_it_states(room: str) -> None:
    if room.endswith("torch") and find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    package = importlib.import_module(room)
    for name, place in stated(room).items():
        module, _, attribute = place.partition(":")
        assert getattr(package, name) is getattr(importlib.import_module(module), attribute)
        assert not is_module(f"{room}.{name}"), "a module of the room would hide it"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing


def test_a_room_states_no_more_than_plugins_take() -> None:
    if not (ROOT / "plugins").is_dir():
        pytest.skip("the plugins that take them are not here")
    taken = {f"{module}.{name}" for module, name in of_plugins()}
    told = (SOURCE / "finecast" / "plugin.py").read_text(encoding="utf-8")
    names = [f"{room}.{name}" for room in ROOMS for name in stated(room)]
    assert [name for name in names if name not in taken and f"``{name}``" not in told] == []
