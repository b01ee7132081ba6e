"""The pass on a joint training graph: forward and backward, before they are partitioned.

The graph is captured with whole ops (layer norm, softmax, attention and their gradients), so
that a plan decides about those and not about the ops that Inductor decomposes them into. They
are decomposed after the casts are inserted, each in the type that it computes in.
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

from finecast.frontends.torch.native import TorchNative, apply_edits, convert_element_type
from finecast.frontends.torch.reader import hinted_shapes, read
from finecast.frontends.torch.restating import free_of_strides, read_whole_memory
from finecast.graph import Graph
from finecast.planning.edits import edits
from finecast.planning.plan import Plan

# Makes a plan from a graph and the shapes of its values.
Planning = Callable[[Graph, dict[int, tuple[int, ...]]], Plan]
Decompositions = dict[Any, Callable[..., Any]]

_FLOATS: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})

WHOLE: Final[Decompositions] = {}
"""Decompositions while the graph is captured: none except autograd's own."""


def lower(module: GraphModule, planning: Planning, decompositions: Decompositions) -> Plan:
    """Plan ``module``, insert the casts, and decompose its ops, all in place.

    Laws: the module's inputs and outputs keep their types, so gradients of fp32 parameters
    are fp32; the order and the names of its inputs stay.
    """
    read_whole_memory(module)
    graph, binding = read(module)
    with unset_fake_temporarily():  # constants are real tensors: they are read and converted
        plan = planning(graph, hinted_shapes(binding))
        by_name = {n.name: n.id for n in graph.nodes}
        formats = {by_name[name]: fmt for name, fmt in plan.formats.items()}
        model = TorchNative(graph, binding, convert=convert_element_type)
        apply_edits(model, edits(graph, formats))
    free_of_strides(module)
    _decompose(module, decompositions)
    return plan


def cast_parameters_again(graph: torch.fx.Graph, parameters: Collection[int]) -> None:
    """Tell the partitioner that the backward pass casts parameters itself.

    ``parameters`` are indices of the graph's inputs. They are in memory all the time, so
    casting them again takes one pass over them and no memory; the low copies, saved by every
    layer, would take half of the model's size.
    """
    inputs = graph.find_nodes(op="placeholder")
    for number in parameters:
        for user in inputs[number].users:
            if user.target is torch.ops.prims.convert_element_type.default:
                user.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _decompose(module: GraphModule, decompositions: Decompositions) -> None:
    """Trace the graph again with ``decompositions``; keeps names and metadata of its ports."""
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
    """Runs a graph with all results in the types of ``meta["val"]``, which are the plan's.

    A decomposition may give another type than the op's kernel: group norm's gives statistics
    in its input's type, where the kernel gives fp32.
    """

    def run_node(self, n: FxNode) -> Any:
        """The node's results; floats are converted to the expected float type."""
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
    """Give ``module`` the attributes that the graph of ``traced`` reads.

    Tracing numbers constants anew, so an attribute of that name may be another constant.
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
    """A block in the fake mode of the inputs that admits the graph's real constants."""
    mode = detect_fake_mode(fakes)
    mode = mode if mode is not None else FakeTensorMode()
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:
            yield
    finally:
        mode.allow_non_fake_inputs = before
