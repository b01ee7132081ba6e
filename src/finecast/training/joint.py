"""The pass on a training graph: forward and backward together, before they are parted.

The graph comes with its ops whole (layer norm, softmax, attention and their gradients), so
that a plan decides about them and not about the pieces that Inductor takes them apart into;
they are taken apart after the casts are in, each piece then in the type it computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx import GraphModule, Interpreter
from torch.fx import Node as FxNode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils.checkpoint import CheckpointPolicy

from finecast.frontends.torch.layout import free_of_strides, read_whole_memory
from finecast.frontends.torch.reader import hinted_shapes, read
from finecast.frontends.torch.writer import apply_edits, convert_element_type
from finecast.graph import Graph
from finecast.planning.edits import edits
from finecast.planning.plan import Plan

# From the graph and the sizes of its values to its plan.
Planning = Callable[[Graph, dict[int, tuple[int, ...]]], Plan]
Decompositions = dict[Any, Callable[..., Any]]

_FLOATS: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})

WHOLE: Final[Decompositions] = {}
"""Decompositions while the graph is captured: none beyond what autograd itself does."""


def lower(module: GraphModule, planning: Planning, decompositions: Decompositions) -> Plan:
    """Plan ``module``, put the casts in, and take its whole ops apart, all in place.

    Laws: the module's inputs and outputs keep their types, so gradients of fp32 parameters
    leave in fp32; the order and the names of its inputs stay.
    """
    read_whole_memory(module)
    graph, binding = read(module)
    with unset_fake_temporarily():  # constants are real: they are looked at and converted
        plan = planning(graph, hinted_shapes(binding))
        by_name = {n.name: n.id for n in graph.nodes}
        formats = {by_name[name]: fmt for name, fmt in plan.formats.items()}
        apply_edits(graph, binding, edits(graph, formats), convert=convert_element_type)
    free_of_strides(module)
    _take_apart(module, decompositions)
    return plan


def cast_parameters_again(graph: torch.fx.Graph, parameters: Collection[int]) -> None:
    """Tell a partitioner that the backward pass casts parameters itself.

    ``parameters`` are inputs of ``graph``, by their place. They are there all the time, so to
    cast them again takes one pass over them and no memory; the low copies, saved by every
    layer, would be half of the model's size.
    """
    inputs = graph.find_nodes(op="placeholder")
    for number in parameters:
        for user in inputs[number].users:
            if user.target is torch.ops.prims.convert_element_type.default:
                user.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _take_apart(module: GraphModule, decompositions: Decompositions) -> None:
    """Trace the graph again with ``decompositions``; keeps what partitioners look at."""
    old_inputs = module.graph.find_nodes(op="placeholder")
    (old_end,) = module.graph.find_nodes(op="output")
    fakes = [node.meta.get("val") for node in old_inputs]

    def run(*flat: Any) -> Any:
        return _Typed(module).run(*flat, enable_io_processing=False)

    with _mode_of(fakes), enable_python_dispatcher(), preserve_node_meta():
        traced = make_fx(run, decomposition_table=decompositions)(*fakes)
    new_inputs = traced.graph.find_nodes(op="placeholder")
    (new_end,) = traced.graph.find_nodes(op="output")
    kept = [(n.name, n.target, dict(n.meta)) for n in old_inputs]
    end_meta = dict(old_end.meta)
    _clear(module.graph)
    _take_attributes(module, traced)
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in traced.graph.nodes:
        copied[node] = module.graph.node_copy(node, lambda n: copied[n])
    for node, (name, target, meta) in zip(new_inputs, kept, strict=True):
        copied[node].target = target
        copied[node]._rename(name)  # pyright: ignore[reportPrivateUsage] - as torch's passes do
        copied[node].meta = meta
    end = copied[new_end]
    end.meta = end_meta
    if isinstance(end.args[0], list | tuple) and isinstance(old_end.args, tuple):
        end.args = (list(end.args[0]),)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()


class _Typed(Interpreter):
    """Runs a graph; results have the types of ``meta["val"]``, which are the plan's.

    Decompositions and kernels do not always agree: group norm's gives its statistics in the
    type of its input, and its gradient in the type of those, where the kernel gives fp32.
    """

    def run_node(self, n: FxNode) -> Any:
        """One node, its float results converted where they have another float type."""
        result, expected = super().run_node(n), n.meta.get("val")
        if isinstance(result, torch.Tensor):
            return _as_planned(result, expected)
        if isinstance(result, tuple) and isinstance(expected, tuple | list):
            return tuple(_as_planned(*pair) for pair in zip(result, expected, strict=True))
        return result


def _as_planned(result: Any, expected: Any) -> Any:
    both = isinstance(result, torch.Tensor) and isinstance(expected, torch.Tensor)
    if not both or result.dtype is expected.dtype:
        return result
    if not {result.dtype, expected.dtype} <= _FLOATS:
        return result
    return torch.ops.prims.convert_element_type.default(result, expected.dtype)


def _take_attributes(module: GraphModule, traced: GraphModule) -> None:
    """Give ``module`` what the graph of ``traced`` reads by its names.

    Tracing numbers constants anew, so that a name of ``module`` may now be another's.
    """
    names = dict.fromkeys(str(n.target) for n in traced.graph.find_nodes(op="get_attr"))
    for name in names:
        found: Any = getattr(traced, name)
        if hasattr(module, name):
            delattr(module, name)
        if isinstance(found, torch.Tensor):
            module.register_buffer(name, found, persistent=False)
        else:
            setattr(module, name, found)


def _clear(graph: torch.fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)


@contextmanager
def _mode_of(fakes: Sequence[Any]) -> Generator[None]:
    """The inputs' fake mode inside; it takes the graph's own constants, which are real."""
    mode = detect_fake_mode(fakes)
    mode = mode if mode is not None else FakeTensorMode()
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:
            yield
    finally:
        mode.allow_non_fake_inputs = before
