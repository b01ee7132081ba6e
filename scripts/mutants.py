"""Mutation testing: how many small faults in the source do the tests notice?

Cosmic Ray makes the mutants, one at a time, in a copy of the tree. Of each module a sample is
tried, the same at every run. Annotations, decorators and signatures are not mutated, as they
hardly change a result. Each test file of the group runs once alone, under coverage.py; then a
mutant is tried on the files that executed its statement, the quickest first. Other files
cannot notice it. Survivors are printed with the lines changed, to be judged one by one;
``docs/testing.md`` has the figures.

    python scripts/mutants.py solver                 # one group; without a name all of them
    python scripts/mutants.py tuning --sample 5      # mutants of each module
    python scripts/mutants.py torch --modules writer # modules whose path contains "writer"

The tests run in the Python that runs this script. ``cosmic-ray`` may be in another environment
on ``PATH``; modules on ``PYTHONPATH`` are found by the tests, too.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
SEED: Final = 20261121


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Modules, by patterns below ``src/finecast``, and the tests that should notice faults.

    ``bar`` is the least share of mutants that has to be noticed.
    """

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    bar: float = 0.75


CORE_BAR: Final = 0.85


def room(name: str, *more: str, bar: float = 0.75) -> Group:
    """The group of a package's modules, the tests of the same name, and ``more`` tests."""
    return Group(modules=(f"{name}/**/*.py",), tests=(f"tests/{name}", *more), bar=bar)


GROUPS: Final[Mapping[str, Group]] = {
    "numbers": room("numbers", bar=CORE_BAR),
    "solver": room("solver", "tests/planning/test_problem.py", bar=CORE_BAR),
    "planning": room("planning", "tests/rules/test_policy.py", "tests/graph", bar=CORE_BAR),
    "rules": room("rules", "tests/torch/test_rules.py"),
    "devices": room("devices"),
    "data": room("data"),
    "measure": room("measure"),
    "tuning": room(
        "tuning",
        "tests/native",
        "tests/cli/test_tune.py",
        "tests/cli/test_emulation_verbs.py",
        "tests/cli/test_refusals.py",
        "tests/engines/emulator/test_torch_programs.py",
    ),
    "onnx": Group(
        modules=("frontends/onnx/*.py", "native/*.py"),
        tests=(
            "tests/frontends",
            "tests/native",
            "tests/tuning",
            "tests/engines/emulator",
            "tests/cli/test_refusals.py",
        ),
    ),
    "torch": Group(
        modules=(
            *("frontends/torch/*.py", "engines/torch/*.py", "native/torch/*.py"),
            *("torch/*.py", "training/*.py"),
        ),
        tests=(
            "tests/torch",
            "tests/native",
            "tests/engines/emulator/test_torch_programs.py",
            "tests/cli/test_exported.py",
            "tests/cli/test_exported_emulation.py",
        ),
    ),
}


def main() -> int:
    """Try the groups named; returns 1 if any is below its bar."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--sample", type=int, default=6, help="mutants of each module")
    parser.add_argument("--modules", default="", help="only modules whose path contains this")
    given = parser.parse_args()
    unknown = set(given.groups) - set(GROUPS)
    if unknown:
        parser.error(f"no group {', '.join(sorted(unknown))}; use {', '.join(GROUPS)}")
    below = False
    for name in given.groups or GROUPS:
        killed, tried = run(name, GROUPS[name], given.sample, given.modules)
        share, bar = killed / max(tried, 1), GROUPS[name].bar
        below |= share < bar
        print(f"{name}: {killed} of {tried} killed, {share:.0%} (bar {bar:.0%})", flush=True)
    return int(below)


@dataclass(frozen=True, slots=True, kw_only=True)
class TestFile:
    """A test file: its time and the statements it executes, with the source unchanged."""

    path: str
    seconds: float
    executed: Mapping[str, frozenset[int]]  # module -> first lines of statements


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A change that Cosmic Ray can make, and its line."""

    module: str
    operator: str
    occurrence: int
    row: int


def run(name: str, group: Group, sample: int, part: str) -> tuple[int, int]:
    """Numbers of killed and tried mutants of one group; prints the verdict on each."""
    tree = copied(name)
    source = tree / "src" / "finecast"
    found = {p.relative_to(tree) for pattern in group.modules for p in source.glob(pattern)}
    modules = [m for m in sorted(map(str, found)) if part in m]
    tests = list(executed(tree, test_files(tree, group.tests), modules))
    tests.sort(key=lambda t: t.seconds)
    killed = tried = 0
    for mutant in sampled(mutants(tree, modules), sample):
        line = statement((tree / mutant.module).read_text(), mutant.row)
        reached = [t for t in tests if line in t.executed.get(mutant.module, ())]
        start = time.perf_counter()
        with mutated(tree, mutant) as changed:
            if not changed:
                print(f"Cosmic Ray fails to make: {mutant}", flush=True)
                continue
            noticed = bool(reached) and fails(tree, reached)
        tried, killed = tried + 1, killed + noticed
        verdict = "killed" if noticed else "survived" if reached else "not executed"
        seconds = time.perf_counter() - start
        print(f"{verdict}: {mutant.module}:{mutant.row} ({seconds:.0f} s)", flush=True)
        for line in () if noticed else changed:
            print(f"    {line}", flush=True)
    return killed, tried


def copied(name: str) -> Path:
    """A copy of the source tree, in which mutants are made."""
    tree = ROOT / "build" / "mutants" / name
    shutil.rmtree(tree, ignore_errors=True)
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", ".hypothesis")
    shutil.copytree(ROOT, tree, ignore=ignored)
    return tree


def test_files(tree: Path, patterns: Iterable[str]) -> list[str]:
    """The test files in the folders and files named."""
    named = [p for pattern in patterns for p in sorted(tree.glob(pattern))]
    files = [p for n in named for p in ([n] if n.is_file() else sorted(n.rglob("test_*.py")))]
    return [str(p.relative_to(tree)) for p in dict.fromkeys(files)]


def executed(tree: Path, tests: Iterable[str], modules: Sequence[str]) -> Iterator[TestFile]:
    """Run each test file alone under coverage, with the processes that it starts."""
    config = tree / "coverage.toml"
    config.write_text(
        "[tool.coverage.run]\n"
        f"source = [{json.dumps(str(tree / 'src' / 'finecast'))}]\nparallel = true\n"
        'patch = ["subprocess", "_exit"]\nsigterm = true\n'
        "[tool.coverage.report]\nexclude_lines = []\n"
    )
    for number, path in enumerate(tests):
        data, lines = tree / f"coverage-{number}", tree / f"coverage-{number}.json"
        options = [f"--rcfile={config}", f"--data-file={data}"]
        start = time.perf_counter()
        coverage(tree, "run", *options, "-m", *pytest(path))
        seconds = time.perf_counter() - start
        print(f"{path}: {seconds:.0f} s", flush=True)
        coverage(tree, "combine", "-q", *options)
        coverage(tree, "json", "-q", *options, f"--include={','.join(modules)}", "-o", lines)
        files = json.loads(lines.read_text())["files"]
        reached = {m: frozenset[int](files[m]["executed_lines"]) for m in files}
        yield TestFile(path=path, seconds=seconds, executed=reached)


def coverage(tree: Path, *command: str | Path) -> None:
    """Run coverage.py; RuntimeError with what it printed if it or a test fails."""
    done = subprocess.run(
        [sys.executable, "-m", "coverage", *command],
        **surroundings(tree),
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{command}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")


def surroundings(tree: Path) -> dict[str, Any]:
    """The folder and the environment in which the tests of ``tree`` run."""
    paths = [str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"cwd": tree, "env": {**os.environ, "PYTHONPATH": ":".join(paths), "CI": "1"}}


def pytest(*tests: str) -> list[str]:
    """Arguments of ``python -m`` that run ``tests``."""
    return ["pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]


def mutants(tree: Path, modules: Sequence[str]) -> Iterator[Mutant]:
    """All mutants of the modules that can change a result, in a fixed order.

    Mutants of ``is`` to ``==`` are left out: the source compares None and members of enums by
    ``is``, for which both are the same.
    """
    config = tree / "cosmic-ray.toml"
    config.write_text(
        f"[cosmic-ray]\nmodule-path = {json.dumps(modules)}\nexcluded-modules = []\n"
        'timeout = 1.0\ntest-command = ""\n[cosmic-ray.distributor]\nname = "local"\n'
    )
    subprocess.run(["cosmic-ray", "init", config, "session.sqlite"], cwd=tree, check=True)
    dump = subprocess.check_output(["cosmic-ray", "dump", "session.sqlite"], cwd=tree)
    specs = [json.loads(line)[0]["mutations"][0] for line in dump.splitlines()]
    specs.sort(key=lambda s: (s["module_path"], s["operator_name"], s["occurrence"]))
    idle = {m: list(without_effect(ast.parse((tree / m).read_text()))) for m in modules}
    for spec in specs:
        module, operator = spec["module_path"], spec["operator_name"]
        start = tuple(spec["start_pos"])
        same = operator.endswith(("_Is_Eq", "_IsNot_NotEq"))
        if not same and not any(first <= start < last for first, last in idle[module]):
            yield Mutant(
                module=module,
                operator=operator,
                occurrence=spec["occurrence"],
                row=start[0],
            )


def statement(source: str, row: int) -> int:
    """The first line of the innermost statement around a row."""
    around = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.stmt))
    lines = [n.lineno for n in around if n.lineno <= row <= (n.end_lineno or n.lineno)]
    return max(lines, default=row)


def sampled(found: Iterable[Mutant], sample: int) -> Iterator[Mutant]:
    """``sample`` mutants of each module, the same at every run."""
    by_module: dict[str, list[Mutant]] = {}
    for mutant in found:
        by_module.setdefault(mutant.module, []).append(mutant)
    for module, of_it in by_module.items():
        yield from random.Random(f"{SEED} {module}").sample(of_it, min(sample, len(of_it)))


@contextmanager
def mutated(tree: Path, mutant: Mutant) -> Generator[list[str]]:
    """Put the mutant into its module; yields the lines changed, none if it cannot be made."""
    path = tree / mutant.module
    untouched = path.with_suffix(".untouched")
    shutil.copy2(path, untouched)
    before = path.read_text().splitlines()
    command = [mutant.module, mutant.operator, str(mutant.occurrence)]
    try:
        subprocess.run(
            ["cosmic-ray", "apply", *command], cwd=tree, check=False, capture_output=True
        )
        after = path.read_text().splitlines()
        yield [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    finally:
        shutil.move(untouched, path)  # with its old time, so that its .pyc stays valid


def fails(tree: Path, tests: Sequence[TestFile]) -> bool:
    """True if a test fails, or they take three times as long as without the mutant."""
    given = surroundings(tree)
    given["env"]["PYTHONDONTWRITEBYTECODE"] = "1"
    process = subprocess.Popen(
        [sys.executable, "-m", *pytest(*(t.path for t in tests))],
        **given,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=30 + 3 * sum(t.seconds for t in tests)) != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        with suppress(ProcessLookupError):  # also ends all processes that the tests started
            os.killpg(process.pid, signal.SIGKILL)


def without_effect(module: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The spans of annotations, decorators and signatures: (row, column) to (row, column)."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            body = node.body[0]
            yield (node.lineno, node.col_offset), (body.lineno, body.col_offset)
        parts: list[Any] = [
            *getattr(node, "decorator_list", ()),
            getattr(node, "annotation", None),
            getattr(node, "returns", None),
        ]
        for part in parts:
            if part is not None:
                before = part.col_offset - 1  # a decorator's @
                yield (part.lineno, before), (part.end_lineno, part.end_col_offset)


if __name__ == "__main__":
    sys.exit(main())
