"""Models whose external data are symbolic links, for engines that do not follow these."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from finecast.errors import ModelError
from finecast.files.staging import staging
from finecast.frontends.onnx.model import load


@contextmanager
def without_links(model: Path | bytes) -> Generator[Path | bytes]:
    """``model``, or if it is a link, a copy with data that are no links, inside the block.

    In the caches of Hugging Face's hub a model and its data are links to files beside each
    other, and OpenVINO refuses data outside of the model's folder. The copies are hard links,
    which take no space, or files where hard links are impossible (another file system).
    """
    names = [] if isinstance(model, bytes) or not model.is_symlink() else _names(model)
    if isinstance(model, bytes) or not any((model.parent / n).is_symlink() for n in names):
        yield model
        return
    with staging() as folder:
        for part in (Path(model.name), *names):
            there = folder / part
            there.parent.mkdir(parents=True, exist_ok=True)
            _place((model.parent / part).resolve(), there)
        yield folder / model.name


def _names(model: Path) -> list[Path]:
    """External data that the model may read, relative to its folder and below it."""
    try:
        files = load(model).external
    except ModelError:  # the engine will say what is wrong
        return []
    names = [f.relative_to(model.parent) for f in files]
    return [n for n in names if ".." not in n.parts]


def _place(file: Path, there: Path) -> None:
    try:
        os.link(file, there)
    except OSError:
        shutil.copyfile(file, there)
