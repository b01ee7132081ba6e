"""Ports and ops of an ``ov.Model`` as a ``ModelSource``, as ONNX files have one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finecast.engines.base import TensorSpec
from finecast.engines.source import ModelSource, ModelStep
from finecast.frontends.openvino.bodies import bodies
from finecast.frontends.openvino.reader import port_name, shape_of
from finecast.frontends.openvino.types import label_of

if TYPE_CHECKING:
    import openvino

_NO_STEPS = frozenset({"Parameter", "Result", "Constant"})


def model_source(model: openvino.Model) -> ModelSource:
    """Ports and steps of a model whose ops have names: each op is a step of that name."""
    ops = [op for op in model.get_ordered_ops() if op.get_type_name() not in _NO_STEPS]
    return ModelSource(
        inputs=tuple(_spec(port) for port in model.inputs),
        outputs=tuple(_spec(port) for port in model.outputs),
        steps=tuple(_step(op) for op in ops),
        depth=_depth(model),
    )


def op_names(model: openvino.Model) -> dict[str, tuple[str, ...]]:
    """The step of each op, by the op's name: both have the same."""
    return {s.name: (s.name,) for s in model_source(model).steps}


def _spec(port: openvino.Output) -> TensorSpec:
    label = label_of(port.get_element_type())
    return TensorSpec(name=port_name(port), dtype=label, shape=shape_of(port))


def _step(op: openvino.Node) -> ModelStep:
    return ModelStep(
        name=op.get_friendly_name(),
        op=op.get_type_name(),
        inputs=tuple(_tensor(value) for value in op.input_values()),
        outputs=tuple(_tensor(port) for port in op.outputs()),
    )


def _tensor(port: openvino.Output) -> str:
    return f"{port.get_node().get_friendly_name()}:{port.get_index()}"


def _depth(model: openvino.Model) -> int:
    inner = (body for op in model.get_ops() for body in bodies(op))
    return max((1 + _depth(body) for body in inner), default=0)
