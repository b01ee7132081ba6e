"""The source keeps the shape that docs/architecture/ describes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "finecast"
SOURCES = (SOURCE, *sorted(ROOT.glob("plugins/*/src")))
MOST_PARAMETERS = 7
MOST_AT_THE_TOP = 12
# Typer reads the options of a verb from its ``run``. The verbs of Python take one more.
KEYWORDS = {"api/tuning.py:tune"}
MOST_OF_A_VERB = 8


# What a process remembers for good, and why. Each is one per process whoever asks.
KEPT_IN_MODULES = {
    "engines/probe.py: _cache": "what this machine's engines can do: measured once",
    "engines/torch/costs.py: _seen": "times of this machine's kernels: measured once",
    "native/profiles.py: _KNOWN": "times of this machine's casts: measured once",
    "terminal.py: _Results": "where this process prints results",
    "files/locks.py: _HOLDERS": "locks on files are the process's own",
    "frontends/collection.py: _Uncollected": "the garbage collector is the process's own",
    "frontends/onnx/native.py: _worker": "the one child process that runs onnx's passes",
}
# What cached functions may be asked with: by these the cache holds no model alive.
PLAIN = {"str", "int", "bool", "Format", "tuple[str, ...]"}
CHANGES = {
    *("append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "insert"),
    *("remove", "discard"),
}


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> tuple[tuple[Path, ast.Module, tuple[Definition, ...]], ...]:
    """Each module with its classes and functions, inner ones included."""
    found: list[tuple[Path, ast.Module, tuple[Definition, ...]]] = []
    for source, path in ((s, p) for s in SOURCES for p in sorted(s.rglob("*.py"))):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = tuple(n for n in ast.walk(tree) if isinstance(n, Definition))
        found.append((path.relative_to(source), tree, inside))
    return tuple(found)


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    """The trees take memory that later tests of the process need."""
    yield
    modules.cache_clear()
    paths.cache_clear()
    own_names.cache_clear()


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, _, nodes in modules():
        for node in nodes:
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
    for path, _, nodes in modules():
        for node in nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path))
    assert {name: of for name, of in homes.items() if len(of) > 1} == {}


def test_functions_take_few_parameters() -> None:
    counts = {name: len(parameters(node)) for name, node in functions()}
    many = {name for name, count in counts.items() if count > MOST_PARAMETERS}
    verbs = {name for name in many if re.match(r"cli/\w+\.py:run|\w+/command\.py:run", name)}
    assert many - verbs <= KEYWORDS
    assert many >= KEYWORDS  # none is listed for nothing
    assert all(counts[verb] <= MOST_OF_A_VERB for verb in KEYWORDS)


Named = tuple[Path, str]
"""A module, by its path, and a name that it binds."""


def module_name(path: Path) -> str:
    """The name by which other modules import the one at ``path``."""
    parts = [part for part in path.with_suffix("").parts if part != "__init__"]
    return ".".join(parts if path.parts[0].startswith("finecast_") else ["finecast", *parts])


@cache
def paths() -> dict[str, Path]:
    """The path of each module by its name."""
    return {module_name(path): path for path, _, _ in modules()}


@cache
def own_names() -> dict[Path, set[str]]:
    """What each module binds itself: variables and classes."""
    own: dict[Path, set[str]] = {}
    for path, tree, _ in modules():
        own[path] = {n.name for n in tree.body if isinstance(n, ast.ClassDef)}
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else ()
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            own[path] |= {t.id for t in targets if isinstance(t, ast.Name)}
    return own


def names_of(path: Path, tree: ast.Module) -> dict[str, Named]:
    """Where the names of a module are bound: in it, or where it imports them from."""
    names: dict[str, Named] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in paths():
            home = paths()[node.module]
            named = (alias for alias in node.names if alias.name in own_names()[home])
            names |= {alias.asname or alias.name: (home, alias.name) for alias in named}
    return names | {name: (path, name) for name in own_names()[path]}


def outer_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods that are not inside of another function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        else:
            yield from outer_functions(node)


def locals_of(function: ast.AST) -> set[str]:
    """Names that a function binds for itself: they stand for nothing of the module."""
    nodes = [*ast.walk(function)]
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    shared = {name for n in nodes if isinstance(n, ast.Global) for name in n.names}
    return (stored | {n.arg for n in nodes if isinstance(n, ast.arg)}) - shared


def changed_by(node: ast.AST) -> Iterator[str]:
    """Names that a statement or a call changes what stands behind."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = [e for t in node.targets for e in getattr(t, "elts", [t])]
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        targets = [node.func] if node.func.attr in CHANGES else []
    elif isinstance(node, ast.Global):
        yield from node.names
    for target in targets:
        owner = target.value if isinstance(target, ast.Subscript | ast.Attribute) else None
        if isinstance(owner, ast.Name):
            yield owner.id


def mutable_classes() -> set[Named]:
    """Classes of our own whose instances can change: all but frozen ones and enums."""
    return {
        (path, node.name)
        for path, _, nodes in modules()
        for node in nodes
        if isinstance(node, ast.ClassDef)
        and not any("frozen=True" in ast.unparse(d) for d in node.decorator_list)
    }


def made_by(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Module variables that are what a call gives, and the name of what is called."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield ast.unparse(target), ast.unparse(node.value.func)


def test_modules_keep_no_state() -> None:
    """What is found out about a model lives as long as the model."""
    classes = mutable_classes()
    kept: set[Named] = set()
    for path, tree, _ in modules():
        names = names_of(path, tree)
        kept |= {(path, name) for name, of in made_by(tree) if names.get(of) in classes}
        for function in outer_functions(tree):
            changed = {name for node in ast.walk(function) for name in changed_by(node)}
            kept |= {names[n] for n in changed - locals_of(function) if n in names}
    assert {f"{path.as_posix()}: {name}" for path, name in kept} == set(KEPT_IN_MODULES)


def test_caches_hold_no_model() -> None:
    held = [
        f"{path}: {node.name}({argument.arg})"
        for path, _, nodes in modules()
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and any("cache" in ast.unparse(d).partition("(")[0] for d in node.decorator_list)
        and "cached_property" not in {ast.unparse(d) for d in node.decorator_list}
        for argument in (*node.args.args, *node.args.kwonlyargs)
        if argument.annotation is None or ast.unparse(argument.annotation) not in PLAIN
    ]
    assert held == []


def test_pages_name_files_that_there_are() -> None:
    root = ROOT
    plugins = root / "plugins"
    if not plugins.is_dir():
        pytest.skip("pages name files of plugins, too")
    folders = (SOURCE, root / "tests", plugins)
    there = [path.as_posix() for folder in folders for path in folder.rglob("*")]
    for page in (*(root / "docs").rglob("*.md"), root / "README.md", root / "CONTRIBUTING.md"):
        for name in re.findall(r"`([\w/]+\.(?:py|csv|toml))`", page.read_text("utf-8")):
            known = "NAME" in name or (root / name).exists()
            assert known or any(p.endswith(f"/{name}") for p in there), (page.name, name)
