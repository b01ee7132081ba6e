"""The Python API: the command line's power with Python objects.

For example::

    model = finecast.load("model.onnx")
    finecast.convert(model, "low.onnx", policy="all:bf16")
    outcome = finecast.tune(model, "tuned.onnx", data="data.npz", metric="top1")

Each verb has a module, which also has the verb with its options as values (``converted``,
``applied``, ``tuned``): that is what the command line calls. ``declared`` declares the files
of a call for both.
"""

from __future__ import annotations

from finecast.api.application import applied, apply
from finecast.api.blaming import blame
from finecast.api.comparison import diff
from finecast.api.conversion import convert, converted
from finecast.api.emulation import emulate
from finecast.api.explanation import explain
from finecast.api.inspection import inspect
from finecast.api.models import Model, ModelInMemory, load
from finecast.api.outputs import declared
from finecast.api.profiling import profile
from finecast.api.reporting import report
from finecast.api.requests import data_of, on_data, uncertified
from finecast.api.tuning import OF_TUNING, asked, search, tune, tuned
from finecast.api.verification import verify
from finecast.data.options import DataOptions
from finecast.native.artefact import Destination
from finecast.native.model import ReadOptions, RunOptions
from finecast.tuning.goal import TuneRequest

__all__ = [
    "OF_TUNING",
    "DataOptions",
    "Destination",
    "Model",
    "ModelInMemory",
    "ReadOptions",
    "RunOptions",
    "TuneRequest",
    "applied",
    "apply",
    "asked",
    "blame",
    "convert",
    "converted",
    "data_of",
    "declared",
    "diff",
    "emulate",
    "explain",
    "inspect",
    "load",
    "on_data",
    "profile",
    "report",
    "search",
    "tune",
    "tuned",
    "uncertified",
    "verify",
]
