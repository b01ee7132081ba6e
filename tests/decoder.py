"""A tiny decoder of ``examples/decoder`` with weights drawn at random, made once a session."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES = Path(__file__).parent.parent / "examples" / "decoder"
TINY = "--width 32 --heads 2 --layers 2 --hidden 64 --length 24 --batch 2"


@cache
def example(name: str = "make_decoder") -> Any:
    """A module of the example, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


@cache
def folder() -> Path:
    """The folder with decoder.onnx, planted.onnx and texts.npz, after two steps of training.

    Its temporary directory is removed when the process ends.
    """
    place = tempfile.TemporaryDirectory()
    _KEPT.append(place)
    path = Path(place.name)
    code = example().main([*TINY.split(), "--steps", "2", "--out", str(path)])
    assert code == 0
    return path


@cache
def stateful() -> Path:
    """The same decoder as IR that keeps its cache."""
    path = folder() / "stateful.xml"
    example("make_stateful").main(folder() / "decoder.onnx", path)
    return path


def empty(texts: int) -> dict[str, np.ndarray[Any, Any]]:
    """The caches before the first call."""
    names = [f"past_{i}_{kind}" for i in range(2) for kind in ("key", "value")]
    return {name: np.zeros((texts, 2, 0, 16), np.float32) for name in names}


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
