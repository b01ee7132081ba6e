"""MXNet's models: told where MXNet is not, converted from what its own exporter writes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from finecast.compat.neural_compressor import MixedPrecisionConfig, mix_precision
from finecast.errors import EngineError, UsageError

SCRIPT = Path(__file__).parents[2] / "scripts" / "mxnet_to_onnx.sh"
NETWORK = """
import sys
import mxnet as mx
from mxnet.gluon import nn
net = nn.HybridSequential()
net.add(nn.Conv2D(4, 3), nn.Activation("relu"), nn.Flatten(), nn.Dense(3))
net.initialize()
net.hybridize()
net(mx.nd.ones((2, 3, 8, 8)))
net.export(sys.argv[1])
"""


def model(folder: Path) -> Path:
    (folder / "net-0000.params").write_bytes(b"")
    (folder / "net-symbol.json").write_text("{}")
    return folder / "net-symbol.json"


@pytest.mark.parametrize("name", ["net-symbol.json", "net-0000.params"])
def test_where_mxnet_is_not_the_message_says_what_to_do(tmp_path: Path, name: str) -> None:
    model(tmp_path)
    with pytest.raises(EngineError, match=r"MXNet.*here.*scripts/mxnet_to_onnx\.sh"):
        mix_precision.fit(str(tmp_path / name))


def test_two_files_are_one_model(tmp_path: Path) -> None:
    model(tmp_path)
    (tmp_path / "net-0000.params").unlink()
    with pytest.raises(UsageError, match=r"is two files.*net-0000\.params"):
        mix_precision.fit(str(tmp_path / "net-symbol.json"))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UsageError, match="no MXNet model"):
        mix_precision.fit(str(tmp_path / "other.json"))


def test_mxnet_is_given_the_shapes_of_the_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for MXNet, whose exporter tells what it was called with."""
    from finecast.compat.neural_compressor import mxnet_export

    class Library:
        def __init__(self) -> None:
            self.onnx = self

        def export_model(self, *given: object) -> None:
            raise ValueError(f"called with {given[2]}")

    monkeypatch.setattr(mxnet_export, "_library", Library)
    with pytest.raises(UsageError, match=r"what shapes.*example_inputs"):
        mxnet_export.exported(model(tmp_path), None)
    with pytest.raises(Exception, match=r"cannot export.*called with \[\(2, 3, 8, 8\)\]"):
        mxnet_export.exported(model(tmp_path), np.zeros((2, 3, 8, 8)))


@pytest.mark.slow
@pytest.mark.skipif(
    "FINECAST_MXNET" not in os.environ, reason="FINECAST_MXNET=1 installs MXNet for it"
)
def test_the_script_exports_what_fit_converts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, venv = "2,3,8,8", SCRIPT.parents[1] / ".venv-mxnet"
    with pytest.raises(subprocess.CalledProcessError):  # it has made the environment by then
        subprocess.run([SCRIPT, "none", "none", shapes, "none"], check=True)
    made = tmp_path / "net"
    subprocess.run([venv / "bin/python", "-c", NETWORK, str(made)], check=True)
    files = (f"{made}-symbol.json", f"{made}-0000.params")
    subprocess.run([SCRIPT, *files, shapes, tmp_path / "net.onnx"], check=True)
    monkeypatch.setenv("FORCE_BF16", "1")
    result = mix_precision.fit(str(tmp_path / "net.onnx"), MixedPrecisionConfig())
    assert result.products == 2
