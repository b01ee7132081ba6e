"""The table of faults: its laws, its reports, and what a mended release changes."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from finecast.devices import faults
from finecast.devices.faults import KnownFault, known_faults
from finecast.engines.faults import FAULTS
from finecast.engines.faults import faults as found_in
from finecast.measure.environment import environment
from finecast.numbers.formats import Format
from scripts.faults import page
from tests.graph.text import from_text

ROOT = Path(__file__).parent.parent.parent
TEXTS = {f.name: ROOT / f.upstream for f in known_faults().values() if "://" not in f.upstream}
NEEDS = {
    "openvino-cast-rounding": "avx512f",
    "openvino-computed-axes": "avx512_bf16",
    "openvino-depthwise-volumes": "avx512_bf16",
    "openvino-lost-marks": "avx512_bf16",
    "openvino-reduced-codes": "avx512_vnni",
    "openvino-stacked-scales": "avx512_vnni",
    "openvino-sums-of-codes": "avx512_vnni",
}
"""Instructions without which a CPU does not show a fault."""
SOMETIMES = {"openvino-block-and-chain"}
"""Faults that not every CPU shows, even of those with the same instructions."""


@pytest.mark.parametrize("fault", known_faults().values(), ids=lambda f: f.name)
def test_each_row_has_its_report_and_its_test(fault: KnownFault) -> None:
    assert fault.name.startswith(f"{fault.engine}-")
    assert fault.seen
    assert fault.fault.endswith(".")
    assert fault.treated.endswith(".")
    if "://" in fault.upstream:
        assert re.fullmatch(
            r"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+", fault.upstream
        )
    else:
        assert TEXTS[fault.name].stem == fault.name
    file, _, name = fault.test.partition("::")
    tests = {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert not name or name in tests


def test_rows_of_engines_are_in_the_table() -> None:
    kept = {f.name for f in FAULTS}
    treated = {name: fault.treated for name, fault in known_faults().items()}
    assert {n for n, text in treated.items() if text == "The op keeps fp32."} == kept
    assert {p.stem for p in (ROOT / "docs/upstream").iterdir()} == TEXTS.keys()


def test_the_page_is_that_of_the_table() -> None:
    """``python scripts/faults.py`` writes it anew."""
    assert (ROOT / "docs/faults.md").read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_written_for_upstream_still_shows_it(name: str) -> None:
    """Where it does not, the release is right: it is the row's ``mended``."""
    fault = known_faults()[name]
    pytest.importorskip(fault.engine)
    (script,) = re.findall(
        r"```python\n(.*?)```", TEXTS[name].read_text(encoding="utf-8"), re.DOTALL
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert b"ImportError" not in done.stderr
    assert b"NameError" not in done.stderr
    needed = NEEDS.get(name)
    if done.returncode == 0 and needed is not None and needed not in environment().flags:
        pytest.skip(f"this CPU has no {needed}")
    if done.returncode == 0:  # kernels of older CPUs have it
        older = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, check=False, env=older
        )
    if done.returncode == 0 and name in SOMETIMES:
        pytest.skip("this CPU does not show it")
    assert done.returncode != 0


@pytest.mark.parametrize(
    ("release", "is_here"),
    [("2026.4.1", True), ("2026.9.0-1-dev", True), ("2026.10.0", False), ("2027.1", False)],
)
def test_a_mended_release_has_the_fault_no_longer(
    monkeypatch: pytest.MonkeyPatch, release: str, is_here: bool
) -> None:
    rows = known_faults()
    fault = replace(rows["openvino-bias-add"], mended="2026.10")
    monkeypatch.setattr(faults, "_installed", lambda _: release)
    assert fault.is_here is is_here
    assert rows["openvino-bias-add"].is_here
    monkeypatch.setitem(rows, fault.name, fault)
    graph = from_text(
        "input %0 x fp32[4]\nnode n add com.microsoft::BiasAdd fp32 (%0) -> (%1 y fp32[4])\n"
    )
    (nodes,) = found_in("openvino", "CPU", graph, [Format.BF16]).values()
    assert bool(nodes) is is_here


def test_an_engine_that_is_not_installed_has_its_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(faults.metadata, "version", missing)
    faults._installed.cache_clear()
    try:
        assert replace(known_faults()["torch-low-samplers"], mended="2.14").is_here
    finally:
        faults._installed.cache_clear()
