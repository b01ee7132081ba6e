"""One environment for each peer, as pip makes it: what a tool needs is a row of a table.

An environment is a virtual environment named by its tool in one folder. A file in it states
the requirements that were installed, so that a changed row makes the environment anew. Where
pip fails, its reason in one line stands in the table of results.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_DONE: Final = "requirements.json"
_LIMIT_S: Final = 1800.0
# PyTorch's release whose wheel for CPUs alone is in the package index used here; from PyPI the
# same release comes with CUDA's libraries and works as well.
_TORCH: Final = "torch==2.13.0"
_OPENVINO: Final = "openvino==2026.4.1"

# Requirements by environment. Releases of numpy, onnx and onnxruntime are those that a tool's
# own release was made for, where newer ones lack what it calls.
REQUIREMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "onnxconverter-common": ("onnxconverter-common==1.16.0", "onnxruntime==1.32.0"),
    "modelopt": ("nvidia-modelopt[onnx]==0.47.0", "onnxruntime==1.32.0", _TORCH),
    "nncf": ("nncf==3.4.0", _OPENVINO),
    "neural-compressor": (
        "neural-compressor==2.6", "onnx==1.16.2", "onnxruntime==1.18.1", "numpy==1.26.4",
        "setuptools<80", "six", "timm==1.0.31", "torchvision==0.28.0", "transformers==5.23.0",
        _TORCH,
    ),
    "onnxruntime": ("onnxruntime==1.32.0", "onnx==1.20.1", "sympy==1.14.0"),
    "olive": ("olive-ai[cpu]==0.13.0", "requests==2.34.2", _TORCH),
    "aimet": ("aimet-onnx==2.42.0", _TORCH),
}  # fmt: skip


class NotInstalledError(Exception):
    """An environment that could not be made; its text is the reason in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An interpreter with a peer, and the versions that it has."""

    python: Path
    versions: Mapping[str, str]


def environment(name: str, folder: Path) -> Environment:
    """The environment of that name, made if it is absent or its requirements changed.

    Args:
        name: A key of ``REQUIREMENTS``.
        folder: Where environments are kept.

    Raises:
        NotInstalledError: If pip fails. The failure is kept, so that later calls do not try
            again until the requirements change or the folder is removed.
    """
    wanted: list[str] = [*REQUIREMENTS[name]]
    place = folder / name
    python, done = place / "bin" / "python", place / _DONE
    made: dict[str, Any] = (
        json.loads(done.read_text(encoding="utf-8")) if done.is_file() else {}
    )
    if made.get("requirements") != wanted:
        shutil.rmtree(place, ignore_errors=True)
        made = {"requirements": wanted} | _install(place, wanted)
        done.write_text(json.dumps(made, indent=1), encoding="utf-8")
    if "failed" in made:
        raise NotInstalledError(made["failed"])
    return Environment(python=python, versions=made["versions"])


def _install(place: Path, wanted: list[str]) -> dict[str, Any]:
    sys.stderr.write(f"installing {', '.join(wanted)} into {place}\n")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    pip = [str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*pip, "install", "--quiet", *wanted],
            capture_output=True, text=True, check=False, timeout=_LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"pip took more than {_LIMIT_S:g} s"}
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return {"failed": (said or [f"pip's exit code is {done.returncode}"])[-1][:300]}
    listed = subprocess.run(
        [*pip, "list", "--format=json"], capture_output=True, text=True, check=True
    )
    return {"versions": {p["name"].lower(): p["version"] for p in json.loads(listed.stdout)}}
