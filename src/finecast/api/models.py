"""Models and plans as the verbs accept them: paths, objects of a library, or opened ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Unpack

from finecast import keywords
from finecast.arguments import checked, group_of
from finecast.files import holds_object
from finecast.native.model import OpenedModel, ReadOptions
from finecast.native.opening import check_options, opened
from finecast.planning.plan import Plan

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir
    import openvino
    import torch
    from torch.export import ExportedProgram

ModelInMemory: TypeAlias = (
    "onnx.ModelProto | ir.Model | openvino.Model | torch.nn.Module | ExportedProgram"
)
"""An object of a library that is a model; so is one of Keras, which has no types."""
Model: TypeAlias = "OpenedModel | str | Path | ModelInMemory"
"""A model as functions here accept it: loaded, a path, or an object of its library."""


@checked(ReadOptions)
def load(
    model: Model, *, output: str | Path | None = None, **options: Unpack[keywords.LoadKeywords]
) -> OpenedModel:
    """Read a model from its path, or take one in memory; external data stays on disk.

    Args:
        model: The model, or its path.
        output: Where a result will go. Its name decides which library opens a model that
            several read: a SavedModel may give another, or OpenVINO's IR.
        options: ``trust``, for files that bring code; ``example_inputs``, ``example_kwargs``
            and ``dynamic_shapes`` of a PyTorch module, as in ``ReadOptions``.

    Raises:
        UsageError: If there is no such file, or it is not a model.
        ModelError: If the model is incomplete.
    """
    return opened_in_fp32(model, group_of(ReadOptions, options), output)


def opened_in_fp32(
    model: Model, how: ReadOptions, output: str | Path | None = None
) -> OpenedModel:
    """The model as a verb works on it: its ops in ``how.from_type`` are taken to fp32.

    Raises:
        UsageError: If no frontend opens it, or an option does not apply to it.
        ModelError: If it cannot be read.
    """
    if isinstance(model, str | Path):
        check_options(Path(model), {"--from-type": how.from_type})
    read = opened(model, how, output=None if output is None else Path(output))
    return read if how.from_type is None else read.to_fp32(how.from_type)


def plan_of(given: Plan | str | Path | None) -> Plan | None:
    """A plan that is given or read from its file; None if none is given."""
    return given if given is None or isinstance(given, Plan) else Plan.load(Path(given))


def plan_or_model(given: Plan | Model, how: ReadOptions) -> Plan | OpenedModel:
    """A plan or a model: a file is a plan if it is JSON."""
    if isinstance(given, Plan):
        return given
    if isinstance(given, str | Path):
        path = Path(given)
        if path.suffix.lower() == ".json" or holds_object(path):
            return Plan.load(path)
    return opened(given, how)


def file_in(given: object) -> str | Path | None:
    """The file that an argument names; None for an object."""
    return given if isinstance(given, str | Path) else None
