"""Mutation testing: how many small faults in the source do the tests notice?

Cosmic Ray makes the mutants, one at a time, in a copy of the tree; of each module a sample,
the same at every run, is tried on the tests of its group. Annotations, decorators and
signatures are not mutated: they hardly change a result. Survivors are printed with their diff,
to be judged one by one; ``docs/testing.md`` has the figures.

    python scripts/mutants.py solver              # one group; without a name all of them
    python scripts/mutants.py tuner --sample 5    # mutants of each module
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
SEED: Final = 20261121


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Modules, by patterns below ``src/finecast``, and the tests that are to notice."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    timeout_s: float = 300.0
    bar: float = 0.75


CORE_BAR: Final = 0.85


def room(name: str, *more: str, bar: float = 0.75) -> Group:
    """A room and the tests of the same name, and ``more`` tests."""
    return Group(modules=(f"{name}/**/*.py",), tests=(f"tests/{name}", *more), bar=bar)


GROUPS: Final[Mapping[str, Group]] = {
    "numbers": room("numbers", bar=CORE_BAR),
    "solver": room("solver", "tests/planning/test_problem.py", bar=CORE_BAR),
    "planning": room("planning", "tests/rules/test_policy.py", "tests/graph", bar=CORE_BAR),
    "rules": room("rules", "tests/torch/test_rules.py"),
    "devices": room("devices"),
    "data": room("data"),
    "measure": room("measure"),
    "pipeline": room(
        "pipeline", "tests/cli/test_tune.py", "tests/cli/test_emulation_verbs.py"
    ),
    "onnx": Group(
        modules=("frontends/onnx/*.py", "subjects/onnx/*.py"),
        tests=("tests/frontends", "tests/subjects", "tests/pipeline"),
    ),
    "torch": Group(
        modules=(
            *("frontends/torch/*.py", "engines/torch/*.py", "subjects/torch/*.py"),
            *("torch/*.py", "training/*.py"),
        ),
        tests=("tests/torch",),
        timeout_s=600.0,
    ),
}


def main() -> int:
    """Try the groups named; 1 if any is below its bar."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--sample", type=int, default=6, help="mutants of each module")
    given = parser.parse_args()
    unknown = set(given.groups) - set(GROUPS)
    if unknown:
        parser.error(f"no group {', '.join(sorted(unknown))}; use {', '.join(GROUPS)}")
    below = False
    for name in given.groups or GROUPS:
        killed, tried = run(name, GROUPS[name], given.sample)
        share, bar = killed / max(tried, 1), GROUPS[name].bar
        below |= share < bar
        print(f"{name}: {killed} of {tried} killed, {share:.0%} (bar {bar:.0%})", flush=True)
    return int(below)


def run(name: str, group: Group, sample: int) -> tuple[int, int]:
    """Killed and tried mutants of one group; survivors are printed."""
    tree = ROOT / "build" / "mutants" / name
    shutil.rmtree(tree, ignore_errors=True)
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".hypothesis")
    shutil.copytree(ROOT, tree, ignore=ignored)
    source = tree / "src" / "finecast"
    modules = sorted({p for pattern in group.modules for p in source.glob(pattern)})
    tests = [str(p.relative_to(tree)) for t in group.tests for p in sorted(tree.glob(t))]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "CI": "1"}
    subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
    config = tree / "cosmic-ray.toml"
    config.write_text(
        "[cosmic-ray]\n"
        f"module-path = {json.dumps([str(m.relative_to(tree)) for m in modules])}\n"
        f"timeout = {group.timeout_s}\nexcluded-modules = []\n"
        f"test-command = {json.dumps(' '.join(command))}\n"
        '[cosmic-ray.distributor]\nname = "local"\n'
    )
    cosmic = Path(sys.executable).parent / "cosmic-ray"
    subprocess.run([cosmic, "init", config, "session.sqlite"], cwd=tree, check=True)
    session = tree / "session.sqlite"
    thin(session, tree, sample)
    subprocess.run(
        [cosmic, "exec", config, "session.sqlite"], cwd=tree, env=environment, check=True
    )
    return report(session)


def thin(session: Path, tree: Path, sample: int) -> None:
    """Keep ``sample`` mutants of each module that can change a result.

    ``is`` is used of None and of members of enums, for which ``==`` is the same.
    """
    with sqlite3.connect(session) as db:
        rows = db.execute(
            "SELECT job_id, module_path, start_pos_row, start_pos_col FROM mutation_specs"
            " WHERE operator_name NOT LIKE '%\\_Is\\_Eq' ESCAPE '\\'"
            " AND operator_name NOT LIKE '%\\_IsNot\\_NotEq' ESCAPE '\\'"
            " ORDER BY module_path, operator_name, occurrence"
        ).fetchall()
        everything = [job for (job,) in db.execute("SELECT job_id FROM work_items")]
        by_module: dict[str, list[str]] = {}
        idle: dict[str, list[tuple[tuple[int, int], tuple[int, int]]]] = {}
        for job, module, row, column in rows:
            if module not in idle:
                idle[module] = list(without_effect(ast.parse((tree / module).read_text())))
            if not any(first <= (row, column) < last for first, last in idle[module]):
                by_module.setdefault(module, []).append(job)
        kept = {
            job
            for module, jobs in by_module.items()
            for job in random.Random(f"{SEED} {module}").sample(jobs, min(sample, len(jobs)))
        }
        for table in ("mutation_specs", "work_items"):
            db.executemany(
                f"DELETE FROM {table} WHERE job_id = ?",
                [(job,) for job in everything if job not in kept],
            )


def without_effect(module: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations, decorators and signatures stand: (row, column) to (row, column)."""
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
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def report(session: Path) -> tuple[int, int]:
    """Killed and tried; each survivor's diff goes to the terminal."""
    with sqlite3.connect(session) as db:
        rows = db.execute(
            "SELECT module_path, start_pos_row, test_outcome, diff FROM mutation_specs"
            " JOIN work_results USING (job_id) ORDER BY module_path, start_pos_row"
        ).fetchall()
    killed = 0
    for module, row, outcome, diff in rows:
        killed += outcome != "SURVIVED"
        if outcome == "SURVIVED":
            changed = [
                x for x in diff.splitlines() if x[:1] in "+-" and x[:3] not in ("+++", "---")
            ]
            print(f"survived: {module}:{row}", *changed, sep="\n    ", flush=True)
    return killed, len(rows)


if __name__ == "__main__":
    sys.exit(main())
