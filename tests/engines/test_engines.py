from __future__ import annotations

import subprocess
import sys

import pytest

from finecast import engines
from finecast.engines import (
    ENGINES,
    default_engine,
    devices,
    get_engine,
    installed,
)
from finecast.errors import EngineError, UsageError
from finecast.plugin import EngineEntry


def test_unknown_engines_list_the_known_ones() -> None:
    with pytest.raises(UsageError, match="use one of openvino, onnxruntime"):
        get_engine("tensorrt")


@pytest.mark.parametrize("name", list(ENGINES))
def test_unknown_devices_list_the_present_ones(name: str) -> None:
    if not installed(name):
        pytest.skip(f"{name} is not installed")
    with pytest.raises(EngineError, match=r"use one of .*CPU"):
        get_engine(f"{name}:abacus")
    assert "CPU" in devices(name)


def test_names_and_devices_do_not_mind_case() -> None:
    engine = get_engine("OnnxRuntime:cpu")
    assert (engine.name, engine.device) == ("onnxruntime", "CPU")


def test_an_engine_that_is_not_installed_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = EngineEntry(
        name="absent", module="m", factory="C", requires="no_such", install="pip it"
    )
    monkeypatch.setattr(engines, "ENGINES", {"absent": entry})
    with pytest.raises(EngineError, match=r"'absent' is not installed: pip it"):
        get_engine("absent")


def test_the_default_is_the_first_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_engine().name == next(name for name in ENGINES if installed(name))
    monkeypatch.setattr(engines, "ENGINES", {})
    with pytest.raises(EngineError, match="no engine is installed"):
        default_engine()


def test_importing_engines_imports_no_library() -> None:
    code = (
        "import sys, finecast.engines, finecast.data.datasets, finecast.measure.memory, "
        "finecast.data.metrics, finecast.measure.timing\n"
        "print([m for m in ('onnx', 'openvino', 'onnxruntime', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
