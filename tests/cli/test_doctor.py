from __future__ import annotations

import json

import pytest

from finecast.cli import main
from finecast.cli.backends import BACKENDS, absent_backends
from finecast.cli.doctor import cell, engine_specs
from finecast.engines.base import Capability
from finecast.engines.probe import PROBED


def test_every_engine_here_and_every_backend_absent_is_a_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(e["engine"], e["device"]): e["formats"] for e in found["engines"]}
    assert [f"{name}:{device}" for name, device in rows] == engine_specs()
    for formats in rows.values():
        assert list(formats) == [fmt.label for fmt in PROBED]
        assert formats["fp32"]["runs"]
        for row in formats.values():
            assert row["runs"] or row["reason"]
    here = sum(1 for row in BACKENDS if row.engine in rows)
    assert len(found["not_installed"]) == len(BACKENDS) - here
    assert all(row["install"] for row in found["not_installed"])
    assert found["environment"]["cpu"]


def test_the_table_names_engines_and_what_would_install_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for spec in engine_specs():
        assert spec.partition(":")[0] in out
    assert "CUDAExecutionProvider" in out
    assert "intel-extension-for-tensorflow[cpu]" in out  # brackets are no markup


@pytest.mark.parametrize(
    ("capability", "text"),
    [
        (Capability(runs=False, reason="no kernel"), "no"),
        (Capability(runs=True), "yes"),
        (Capability(runs=True, speed=1.0), "x1"),
        (Capability(runs=True, speed=3.44), "x3.4"),
        (Capability(runs=True, speed=0.6), "slower x0.60"),
    ],
)
def test_cells(capability: Capability, text: str) -> None:
    assert cell(capability) == text


def test_backends_that_are_here_are_left_out() -> None:
    names = [row["backend"] for row in absent_backends({("onnxruntime", "CPU")})]
    assert "CPUExecutionProvider" not in names
    assert "OpenVINO" in names
