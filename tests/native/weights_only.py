"""What tests of formats for weights alone share: a net as ONNX and as IR, and ops of plans."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import openvino
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper, parser

from finecast.engines.base import Array
from finecast.engines.openvino import OpenVinoEngine
from finecast.engines.probe import probe_one
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan


def engine_for(fmt: Format) -> OpenVinoEngine:
    """OpenVINO; the test is skipped where it has no products by weights in ``fmt``."""
    found = OpenVinoEngine()
    if not probe_one(found, fmt).runs:
        pytest.skip(f"this CPU has no products by {fmt.label}")
    return found


def saved(text: str, constants: Mapping[str, Array], folder: Path, kind: str) -> Path:
    """A net as text, with fp32 constants, written as ONNX or, for the kind ``xml``, as IR."""
    path, made = folder / "net.onnx", parser.parse_model(text)
    for name, array in constants.items():
        made.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    onnx.save(made, path)
    if kind != "xml":
        return path
    model = openvino.Core().read_model(path)
    openvino.save_model(model, path.with_suffix(".xml"), compress_to_fp16=False)
    return path.with_suffix(".xml")


def output_of(path: Path, feeds: Mapping[str, Array]) -> NDArray[np.float32]:
    """The output of a net in OpenVINO."""
    (found,) = OpenVinoEngine().load(path).run(feeds).values()
    return found.astype(np.float32)


def coded(plan: Plan, fmt: Format) -> list[str]:
    """Ops in ``fmt``, by the names that they have in ONNX."""
    found = (name for name, used in plan.formats.items() if used is fmt)
    return sorted(name.partition("/")[0] for name in found)
