"""The numbers of values that a model computes from constants alone."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.errors import ModelError
from finecast.files.staging import staging
from finecast.frontends.dry_run import DryRun
from finecast.frontends.openvino.types import FORMATS, label_of

if TYPE_CHECKING:
    import openvino

_FIX: Final = "fold constants as the model is exported"
_EXACT: Final = {"INFERENCE_PRECISION_HINT": "f32"}


def computed(port: openvino.Output) -> NDArray[np.generic]:
    """The numbers of a value that is computed from constants alone.

    OpenVINO evaluates most ops by themselves. It has kernels for others, such as Identity and
    Elu: these run in another process, which a hostile model may crash.

    Raises:
        ModelError: If OpenVINO cannot compute it.
    """
    import openvino
    from openvino import opset13

    results: Any = [opset13.result(port)]
    of_results: Any = openvino.Model  # its stub does not bind this constructor
    model: Any = of_results(results, [], "computed")
    tensor = openvino.Tensor(port.get_element_type(), port.get_shape())
    evaluated = False
    with suppress(RuntimeError):
        evaluated = model.evaluate([tensor], [])
    raw = tensor.data if evaluated else _compiled(model, port)
    fmt = FORMATS.get(label_of(port.get_element_type()))
    return raw if fmt is None or raw.dtype == fmt.dtype else raw.view(fmt.dtype)


def _compiled(model: openvino.Model, port: openvino.Output) -> NDArray[Any]:
    """The result of a model without inputs, from kernels of the CPU."""
    import openvino

    source: Any = port.get_node()
    where = f"op {source.get_friendly_name()!r}"
    settings = {"compile": _EXACT, "device": "CPU"}
    with staging() as folder:
        path = folder / "computed.xml"
        openvino.save_model(model, path, compress_to_fp16=False)
        run = DryRun(library="openvino", settings=settings, model=path, where=where, fix=_FIX)
        with suppress(RuntimeError):
            if kept := run.keep():
                return kept.run([], fresh=True)[0]
    what = f"OpenVINO cannot compute {source.get_type_name()} of constants"
    raise ModelError(what, where=where, fix=_FIX)
