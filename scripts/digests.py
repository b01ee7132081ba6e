"""Digests of plans and of written files, to show that a change of the code changed no byte.

Every model in a folder is converted under several policies, as it is and as OpenVINO's IR:

    python scripts/digests.py MODELS > before.txt
    (change the code)
    python scripts/digests.py MODELS > after.txt
    diff before.txt after.txt

MODELS holds ``.onnx``, ``.xml`` and ``.pt2`` files, and SavedModels where TensorFlow is
installed. A refusal is a line with its message, which is compared like a digest. Arrays in
``MODEL.npz`` beside a model are its data; formats with scales need them. ``--match`` converts
only models whose name contains a text.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

import finecast
from finecast.errors import FinecastError
from finecast.rules.policy import Policy

POLICIES = ("all:bf16", "all:fp16", "all:bf16 by hint", "all:int8_weights", "all:int8")
# Beside them "auto", for a device whose times are modelled: measured times differ by the run.
TARGET = "trn1"


def models_in(folder: Path) -> Iterator[Path]:
    """The models of a folder: files by their suffix, folders by the file that marks them."""
    for path in sorted(folder.iterdir()):
        if path.suffix in (".onnx", ".xml", ".pt2") or (path / "saved_model.pb").is_file():
            yield path


def outputs_of(model: Path) -> tuple[str, ...]:
    """The names of the outputs that a model is converted to."""
    if model.is_dir():
        return ("out",)
    return ("out.onnx", "out.xml") if model.suffix == ".onnx" else (f"out{model.suffix}",)


def digest_of(path: Path) -> str:
    """A digest of a file, or of all files of a folder with their names."""
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            found.update(file.name.encode())
            found.update(file.read_bytes())
    return found.hexdigest()[:16]


def converted(model: Path, output: str, policy: str) -> str:
    """Digests of the plan and of the written files, or the message of a refusal."""
    data = model.with_suffix(".npz")
    calibrated = dict(np.load(data)) if data.is_file() and model.suffix != ".pt2" else None
    if policy.endswith(":int8") and calibrated is None:
        return "no data"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "written" / output
        target.parent.mkdir()
        named = policy.removesuffix(" by hint")
        asked = replace(Policy.of(named), by_hint=named != policy)
        device = TARGET if policy == "auto:bf16" else None
        try:
            done = finecast.convert(
                model,
                target,
                asked,
                target=device,
                data=calibrated,
                verify=False,
                progress=False,
            )
        except FinecastError as error:
            return f"refused: {str(error).replace(folder, '')}".replace("\n", " ")
        if model.suffix == ".pt2":  # its plan holds measured numbers, its file dates
            formats = sorted((name, fmt.label) for name, fmt in done.plan.formats.items())
            return f"formats {_short(repr(formats).encode())} casts {done.casts}"
        plan = _short(done.plan.to_json().encode())
        return f"plan {plan} files {digest_of(target.parent)} casts {done.casts}"


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def main() -> None:
    """Print one line for each model, output and policy."""
    parser = argparse.ArgumentParser(description="Digests of converted models.")
    parser.add_argument("models", type=Path)
    parser.add_argument("--match", default="")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    for model in models_in(asked.models):
        if asked.match not in model.name:
            continue
        for output in outputs_of(model):
            for policy in (*POLICIES, "auto:bf16"):
                line = converted(model, output, policy)
                print(f"{model.name} {output} {policy} {line}", flush=True)
                print(".", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
