"""Plans as Keras's own dtype policies, so that a tuned model can be trained further."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from finecast import Format, Plan
from finecast.calls import checks
from finecast.errors import ModelError, UsageError
from finecast.graph import Graph, Node
from finecast.naming import kind_of
from finecast.ops import by_name
from finecast_tensorflow.frontend.library import tf
from finecast_tensorflow.native import take

__all__ = ["apply_plan"]

_POLICIES: Final = {
    Format.FP32: "float32",
    Format.BF16: "mixed_bfloat16",
    Format.FP16: "mixed_float16",
}
_MARK: Final = re.compile(r"finecast_layer_(\d+)_")


@checks
def apply_plan(model: Any, plan: Plan | None) -> dict[str, str]:
    """Give each layer of a Keras model the dtype policy that is nearest to a plan.

    Law: a layer computes in a low format if the plan gives that format to all of its products,
    or, if it has none, to all of its ops; weights stay fp32 and are trained in fp32. Layers
    that give the model's outputs stay fp32, so that outputs and losses keep their type. The
    model is changed in place; compile it again before training.

    Args:
        model: A built Keras model.
        plan: A plan of this model or of its export: weights may differ, ops may not. None, as
            where no plan helps, is refused.

    Returns:
        The policy of each layer whose ops the plan decides, by the layer's path.

    Raises:
        UsageError: If ``model`` is no built Keras model, or ``plan`` no plan.
        ModelError: If the plan names ops that the model does not have, or a format that Keras
            has no policy for; the model is unchanged then.
    """
    if not hasattr(model, "_flatten_layers"):
        raise UsageError(f"{kind_of(model)} is no Keras model", fix="give one")
    if plan is None:
        raise UsageError(
            f"{kind_of(plan)} is no plan",
            fix="give the plan of a conversion; a model of tune's has none where"
            " outcome.improved is false",
        )
    layers = [layer for layer in model._flatten_layers() if layer is not model]
    with _in_fp32(layers):
        opened, owners = take(model), _owners(model, layers)
    plan.check(opened.file.graph, where=opened.name)
    chosen = _chosen(opened.file.graph, owners, plan)
    ends = {id(tensor._keras_history.operation) for tensor in model.outputs}
    for index, fmt in chosen.items():
        if fmt not in _POLICIES:
            raise ModelError(
                f"Keras has no policy for {fmt.label}",
                where=layers[index].name,
                fix="use bf16 or fp16",
            )
    policies: dict[str, str] = {}
    for index, fmt in chosen.items():
        layer = layers[index]
        name = _POLICIES[Format.FP32 if id(layer) in ends else fmt]
        layer.dtype_policy = tf.keras.DTypePolicy(name)
        policies[layer.path or layer.name] = name  # loaded layers without weights have no path
    model.train_function = model.test_function = model.predict_function = None
    return policies


def _chosen(graph: Graph, owners: Mapping[int, int], plan: Plan) -> dict[int, Format]:
    """The format of each layer, by its index; fp32 if its products differ in the plan."""
    ops: dict[int, list[Node]] = defaultdict(list)
    for node in graph.float_nodes:
        if node.id in owners and plan.decision(node.name) is not None:
            ops[owners[node.id]].append(node)
    formats = plan.formats
    layer_formats: dict[int, Format] = {}
    for layer, nodes in ops.items():
        products = [n for n in nodes if by_name(n.op).matmul_engine]
        wanted = {formats[n.name] for n in products or nodes}
        layer_formats[layer] = wanted.pop() if len(wanted) == 1 else Format.FP32
    return layer_formats


def _owners(model: Any, layers: list[Any]) -> dict[int, int]:
    """The index of the layer that made each node, by the node's id.

    A node's name contains its layer's, but TensorFlow changes names until they are unique. So
    the model is read once more with layers renamed: each name contains the layer's index.
    """
    with _marked(layers):
        graph = take(model).file.graph
    marks = ((n.id, _MARK.findall(n.name)) for n in graph.nodes)
    return {number: int(found[-1]) for number, found in marks if found}


@contextmanager
def _marked(layers: list[Any]) -> Generator[None]:
    """Put each layer's index into its name, until the context ends."""
    names = [layer.name for layer in layers]
    try:
        for index, layer in enumerate(layers):
            layer.name = f"finecast_layer_{index}_{layer.name}"
        yield
    finally:
        for layer, name in zip(layers, names, strict=True):
            layer.name = name


@contextmanager
def _in_fp32(layers: list[Any]) -> Generator[None]:
    """Set the layers' policies to fp32, as plans are of the fp32 model; undone at the end."""
    policies = [layer.dtype_policy for layer in layers]
    try:
        for layer in layers:
            if layer.compute_dtype != layer.variable_dtype:
                layer.dtype_policy = tf.keras.DTypePolicy(layer.variable_dtype)
        yield
    finally:
        for layer, policy in zip(layers, policies, strict=True):
            layer.dtype_policy = policy
