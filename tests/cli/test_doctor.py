from __future__ import annotations

import json
import re
from importlib.util import find_spec

import pytest

from finecast.cli import main
from finecast.cli.doctor import absent_backends, backends, cell, engine_specs
from finecast.engines.base import Capability
from finecast.engines.probe import PROBED
from finecast.measure.environment import cpu_label, environment


def test_every_engine_here_and_every_backend_absent_is_a_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(e["engine"], e["device"]): e["formats"] for e in found["engines"]}
    assert [f"{name}:{device}" for name, device in rows] == engine_specs()
    assert (("torch", "CPU") in rows) == (find_spec("torch") is not None)
    for formats in rows.values():
        assert list(formats) == [fmt.label for fmt in PROBED]
        assert formats["fp32"]["runs"]
        for row in formats.values():
            assert row["runs"] or row["reason"]
    here = sum(1 for row in backends() if tuple(row["engine"].split(":")) in rows)
    assert len(found["not_installed"]) == len(backends()) - here
    assert all(row["install"] for row in found["not_installed"])
    assert found["environment"]["cpu"]


def test_the_table_fits_a_terminal_and_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for spec in engine_specs():
        assert f" {spec} " in out  # on one line
    assert "\\n" not in out
    assert "CUDAExecutionProvider" in out
    assert "export to ONNX" in out
    assert "no engine for it yet" not in out
    notes = re.compile(r"  \w+:\w+ \w+: |CPU: ")
    tables = [line for line in out.splitlines() if not notes.match(line)]
    assert max(map(len, tables)) <= 80


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_pytorch_is_a_row_with_measured_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = (e for e in found["engines"] if e["engine"] == "torch" and e["device"] == "CPU")
    assert row["framework"] == "PyTorch"
    assert row["formats"]["fp32"]["speed"] == 1
    assert row["formats"]["bf16"]["speed"] > 0
    assert not row["formats"]["fp8_e4m3"]["runs"]
    assert "torch" not in [r["install"] for r in found["not_installed"]]


def test_advice_in_brackets_is_no_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = find_spec
    hidden = lambda name, *more: None if name == "torch" else real(name, *more)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", hidden)
    assert main(["doctor"]) == 0
    assert "pip install torch" in capsys.readouterr().out


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
    names = [row["backend"] for row in absent_backends({"onnxruntime:CPU"})]
    assert "CPUExecutionProvider" not in names
    assert "OpenVINO" in names


def test_a_limit_on_instructions_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    for isa in ("", "AVX2_VNNI"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
        environment.cache_clear()
        assert main(["doctor"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert ("ONEDNN_MAX_CPU_ISA=AVX2_VNNI is set" in said) == bool(isa)
        assert cpu_label(environment()).endswith("(ONEDNN_MAX_CPU_ISA=AVX2_VNNI)") == bool(isa)
    environment.cache_clear()
