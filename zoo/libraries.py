"""What has to be said before the libraries are imported."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys


def prepare() -> None:
    """Keep the libraries off the network, and make torchvision importable."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    _load_torchvision()


def _load_torchvision() -> None:
    """Make torchvision importable, also where its C++ operators do not load.

    PyPI's torchvision is built for CUDA; its operators do not load into a PyTorch for CPUs,
    and ``import torchvision`` stops where it registers their gradients. No network here uses
    one of them (they are for detection): its submodules serve without its ``__init__``.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        spec = importlib.util.find_spec("torchvision")
        assert spec is not None
        sys.modules["torchvision"] = importlib.util.module_from_spec(spec)
