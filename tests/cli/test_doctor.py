from __future__ import annotations

import json
import re
from importlib.util import find_spec

import pytest

from finecast.cli import main
from finecast.cli.doctor import (
    EngineRow,
    absent_backends,
    backends,
    cell,
    engine_specs,
    summary,
)
from finecast.engines.base import Capability
from finecast.engines.probe import PROBED
from finecast.measure.environment import cpu_label, environment
from finecast.numbers.formats import Format
from finecast.plugin import title_of


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
    assert main(["doctor", "--all"]) == 0
    out = capsys.readouterr().out
    for spec in engine_specs():
        assert f" {title_of(spec)}" in out  # on one line
    assert "\\n" not in out
    assert "CUDAExecutionProvider" in out
    assert "export to ONNX" in out
    assert "no engine for it yet" not in out
    notes = re.compile(r"  [\w ()]+, \w+: |CPU: ")
    tables = [line for line in out.splitlines() if not notes.match(line)]
    assert max(map(len, tables)) <= 80


def machine_row(**speeds: float) -> EngineRow:
    """An engine with these speeds; none of what it does not run."""
    formats = {
        Format.parse(label): Capability(runs=True, speed=speed)
        for label, speed in speeds.items()
    }
    formats[Format.TF32] = Capability(runs=False, reason="no kernel")
    return EngineRow(framework="ONNX", engine="openvino", device="CPU", formats=formats)


def test_ten_lines_say_what_each_engine_gains_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 10 + len(engine_specs())
    assert max(map(len, lines)) <= 80
    said = " ".join(" ".join(lines).split())
    assert all(title_of(spec) in said for spec in engine_specs())
    assert "finecast doctor --all" in said


def test_formats_that_gain_are_named_the_fastest_first() -> None:
    rows = [machine_row(bf16=1.6, int8=2.41, fp16=0.9), machine_row(bf16=0.98)]
    _, some, none, *_ = summary(environment(), rows)
    assert some.endswith("(ONNX models): faster than fp32 with int8 x2.4, bf16 x1.6")
    assert none.endswith("no format is faster than fp32")


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
    assert main(["doctor", "--all"]) == 0
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
