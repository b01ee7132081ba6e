"""Compilation by Inductor: the pass on the joint graph, gradients, cached weight casts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C import (
    _will_engine_execute_node,  # pyright: ignore[reportPrivateUsage] - no public name
)
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import custom_graph_pass
from torch._inductor.choices import InductorChoices
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import get_gradient_edge
from torch.fx import GraphModule, Interpreter
from torch.fx import Node as FxNode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils.checkpoint import CheckpointPolicy

from finecast import Plan
from finecast.frontends import edits_of
from finecast.frontends.torch import (
    BIASES,
    FxBinding,
    TorchNative,
    apply_edits,
    convert_element_type,
    device_kind,
    expand_ops,
    free_of_strides,
    read,
    read_whole_memory,
)
from finecast.graph import Graph
from finecast.rules import names_biases
from finecast_training.ordering import (
    compute_where_read,
    narrow_before_views,
    order_for_memory,
    order_kernels,
    prevents_overwriting,
)
from finecast_training.products import by_casts, state_products
from finecast_training.weights import WeightCache, hoist_casts

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

    from finecast_training.backend import Backend

# Before PyTorch 2.13 passes on kernels have no class, and results no place in a cache.
_KernelPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)


def compile_graph(backend: Backend, module: GraphModule, inputs: Sequence[Any]) -> Any:
    """Compile one graph that Dynamo captured, with the backend's pass in between."""
    # With a cache, low copies are kept anyway, so the forward pass need not save them.
    cast_again = backend.least_memory or backend.cache is not None
    patches: dict[str, Any] = {
        "joint_custom_pre_pass": _Pass(backend),
        "custom_partitioner_fn": _Partition(cast_again=cast_again),
        # Inductor's estimate assumes that the backward pass frees parameters. By it, all
        # parameters would be cast first of all, and all low gradients be widened at the end,
        # where their fp32 copies are alive at once.
        "reorder_for_peak_memory": False,
        "_post_fusion_custom_pass": _Order(),
    }
    inner: Callable[..., Any] = compile_inner if backend.kernels else compile_op_by_op
    if backend.cache is not None:
        patches["fx_graph_cache"] = False
        inner = partial(_with_cache, backend.cache, inner)

    # With the least memory values are also recomputed where a product of the backward pass
    # needs them in memory: an activation's output in the kernel of its gradient.
    with functorch_config.patch(
        enable_autograd_cache=False,
        ban_recompute_materialized_backward=not backend.least_memory,
    ):
        return compile_fx(
            module,
            inputs,
            inner_compile=inner,
            config_patches=patches,
            decompositions=WHOLE,
        )


class _Pass(CustomGraphPass):
    """Finecast's pass in Inductor's interface; passes of equal uuids give equal results."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __call__(self, graph: torch.fx.Graph) -> None:
        module = graph.owning_module
        assert isinstance(module, GraphModule)
        device = device_kind(module)
        if names_biases(self.backend.overrides_held()):
            expand_ops(module, BIASES)
        lower(
            module,
            lambda graph, binding: self.backend.plan(graph, binding, device),
            select_decomp_table(),
        )

    def uuid(self) -> Any:
        """None keeps the result out of Inductor's caches."""
        key = self.backend.key
        return None if key is None else hashlib.sha256(key.encode()).hexdigest()


class _Partition(CustomPartitionerFn):
    """Inductor's partitioner by minimum cut, with parameters marked to be cast again."""

    def __init__(self, *, cast_again: bool) -> None:
        self.cast_again = cast_again

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        parameters = options.get("static_lifetime_input_indices") or ()
        if self.cast_again:
            cast_parameters_again(gm.graph, parameters)
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
        compute_where_read(backward.graph)
        order_for_memory(backward.graph)
        backward.recompile()
        mark_gradients(gm.graph, backward, parameters)
        return forward, backward

    def uuid(self) -> Any:
        again = "again" if self.cast_again else "once"
        return f"finecast: parameters are cast {again}"


class _Order(_KernelPass):
    """The order of kernels, in Inductor's interface."""

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        return order_kernels(nodes)

    def uuid(self) -> Any:
        return "finecast: kernels in the order of the graph, which write over what they read"


class _Choices(InductorChoices):
    """Inductor's choices, but for kernels that together would take more memory.

    On CPUs, where a kernel runs its loops one after the other. On GPUs a kernel of sums along
    both axes, as of a norm's gradient, reads memory once for both.
    """

    @staticmethod
    def can_fuse(
        scheduler: Scheduler,
        node1: BaseSchedulerNode,
        node2: BaseSchedulerNode,
        shared_data_score: int,
    ) -> bool:
        """Whether two kernels may become one."""
        allowed = InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)
        if not allowed or node1.get_device() != torch.device("cpu"):
            return allowed
        return not prevents_overwriting((node1, node2))


def compile_inner(module: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Inductor's inner compiler, with Inductor's own table of decompositions."""
    keywords: dict[str, Any] = {**options, "get_decomp_fn": select_decomp_table}
    with V.set_choices_handler(_Choices()):
        return compile_fx_inner(module, inputs, **keywords)


class OpByOp:
    """A graph as it is, casts among its ops, with the interface of what Inductor makes."""

    def __init__(self, module: GraphModule) -> None:
        self._boxed_call = True  # of the instance: torch's wrappers copy its attributes
        self.current_callable: Callable[[list[Any]], Any] = make_boxed_func(module.forward)

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the graph; the list of inputs is emptied."""
        return self.current_callable(inputs)


def compile_op_by_op(module: GraphModule, inputs: object, **options: object) -> OpByOp:
    """In place of ``compile_inner``: no kernel is built."""
    del inputs, options
    return OpByOp(module)


def _with_cache(
    cache: WeightCache,
    inner: Callable[..., Any],
    module: GraphModule,
    inputs: Sequence[Any],
    **options: Any,
) -> Any:
    static = options.get("static_input_idxs") or () if options.get("is_inference") else ()
    casts = hoist_casts(module, static)
    added = add_gradients(module) if options.get("is_backward") else ()
    if not casts and not added:
        return inner(module, inputs, **options)
    fakes = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    compiled = inner(module, [*inputs, *fakes[len(inputs) :]], **options)
    return cache.feed(feed(compiled, added), casts)


# ---------------------------------------------------------- the pass on a joint training graph
#
# The graph is captured with whole ops (layer norm, softmax, attention and their gradients), so
# that a plan decides about those and not about the ops that Inductor decomposes them into.
# They are decomposed after the casts are inserted, each in the type that it computes in.

# Makes a plan from a graph and the FX graph that it was read from.
Planning = Callable[[Graph, FxBinding], Plan]
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
        plan = planning(graph, binding)
        model = TorchNative(graph, binding, convert=convert_element_type)
        apply_edits(model, edits_of(graph, by_casts(plan)))
        state_products(graph, binding, plan)
    free_of_strides(module)
    _decompose(module, decompositions)
    narrow_before_views(module.graph)
    module.recompile()
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
        attribute: Any = getattr(traced, name)
        if hasattr(module, name):
            delattr(module, name)
        if isinstance(attribute, torch.Tensor):
            module.register_buffer(name, attribute, persistent=False)
        else:
            setattr(module, name, attribute)


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


# ---------------------------------------------- gradient accumulation inside the backward pass
#
# Usually each microbatch computes a gradient of its own, in fp32 and of the model's size,
# which autograd adds to the existing one and frees. Here the kernel that casts the gradient to
# fp32 adds it in place.

_PLACE: Final = "finecast_gradient_of_input"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedGradient:
    """Output ``result`` of a backward graph is the gradient of its input ``source``."""

    source: int
    result: int


def mark_gradients(
    joint: torch.fx.Graph, backward: GraphModule, parameters: Collection[int]
) -> None:
    """Note at the inputs of ``backward`` that are parameters which output is their gradient.

    ``parameters`` are indices of the joint graph's inputs; the backward graph's outputs are
    the gradients of these inputs, in the same order.
    """
    inputs = joint.find_nodes(op="placeholder")
    places = {inputs[number].name: number for number in parameters}
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in places:
            node.meta[_PLACE] = places[node.name]


def add_gradients(module: GraphModule) -> tuple[AddedGradient, ...]:
    """Have a backward graph add gradients into memory that it gets by two inputs for each.

    The first input is the memory for the sum, the second says whether it has a gradient
    already. The output of the gradient itself becomes None. Only gradients that end in a cast
    to fp32, those of products, are handled.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    (end,) = module.graph.find_nodes(op="output")
    results = list(end.args[0])
    gradients: list[AddedGradient] = []
    last = inputs[-1] if inputs else None
    for number, source in enumerate(inputs):
        place = source.meta.get(_PLACE)
        if place is None or not _is_widened(results[place], source, results):
            continue
        assert last is not None
        value = source.meta["val"]
        with module.graph.inserting_after(last):
            there = module.graph.placeholder(f"there_{source.name}")
            memory = module.graph.placeholder(f"memory_{source.name}")
        there.meta = {"val": value.new_empty((), dtype=torch.bool)}
        memory.meta = {"val": torch.empty_like(value)}
        own = results[place]
        # Directly after it: at the graph's end all low gradients would be alive at once.
        with module.graph.inserting_before(own.next):
            total = _call(module, torch.ops.aten.add.Tensor, memory, own)
            total = _call(module, torch.ops.aten.where.self, there, total, own)
            _call(module, torch.ops.aten.copy_.default, memory, total)
        results[place] = None
        gradients.append(AddedGradient(source=number, result=place))
        last = there
    end.args = (results,)
    module.graph.lint()
    module.recompile()
    return tuple(gradients)


def _is_widened(result: Any, source: FxNode, results: Sequence[Any]) -> bool:
    if not isinstance(result, FxNode) or results.count(result) > 1:
        return False
    widened = result.target is torch.ops.prims.convert_element_type.default
    mine, theirs = result.meta["val"], source.meta["val"]
    return widened and mine.dtype is theirs.dtype and mine.stride() == theirs.stride()


def _call(module: GraphModule, target: Any, *args: FxNode) -> FxNode:
    node = module.graph.call_function(target, args)
    node.meta["val"] = args[-1].meta["val"]
    return node


def feed(compiled: Any, added: Sequence[AddedGradient]) -> Any:
    """``compiled``, changed to be called without the added inputs and to give all gradients.

    Law: after ``loss.backward()`` each parameter's ``grad`` is what autograd would have made.
    A gradient that is not added to ``grad`` (``torch.autograd.grad``), or that a hook reads,
    is computed by itself.
    """
    inner: Callable[[list[Any]], Any] = compiled.current_callable
    flags: dict[tuple[bool, torch.device], torch.Tensor] = {}

    def call(inputs: list[Any]) -> Any:
        sums: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for addition in added:
            parameter = inputs[addition.source]
            kept = _addable(parameter)
            if any(kept is memory for _, _, memory in sums):
                kept = None  # the same parameter twice: autograd adds the two
            memory = torch.empty_like(parameter) if kept is None else kept
            key = kept is not None, parameter.device
            if key not in flags:
                flags[key] = torch.tensor(key[0], device=key[1])
            inputs += [memory, flags[key]]
            sums.append((addition.result, parameter, memory))
        results = list(inner(inputs))
        for place, parameter, memory in sums:
            # Autograd then takes over the memory, as it does with a first gradient.
            if parameter.is_leaf and parameter.grad is memory:
                parameter.grad = None
            results[place] = memory.detach()
        return tuple(results)

    compiled.current_callable = call
    return compiled


def _addable(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that ``parameter`` has, if this backward pass may add to it; else None."""
    kept = parameter.grad if parameter.is_leaf else None
    alike = (
        kept is not None
        and kept.dtype is parameter.dtype
        and kept.stride() == parameter.stride()
        and not kept.requires_grad
    )
    if not alike or parameter._backward_hooks:
        return None
    adder = get_gradient_edge(parameter).node
    try:
        return kept if _will_engine_execute_node(adder) else None
    except RuntimeError:  # raised for leaves inside torch.autograd.grad
        return None
