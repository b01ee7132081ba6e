"""The order of the ops of a backward graph, and what it stores, for the least peak of memory.

Inductor allocates in the order of the graph, and frees a value after its last reader. The
graph comes in the order in which autograd computes: the sum that is a bias's gradient reads
the gradient of a product's result after both products have read a low copy of it. So the sum
comes first here, then the product that is a weight's gradient, and the product for the layer
before last: it alone may need a low copy of the weights, which is then cast as late as
possible. Inductor makes kernels of these ops, which then run in the same order. No number
changes by that.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Final

import torch
from torch._inductor.codegen.wrapper import can_match_buffer_size
from torch._inductor.dependencies import Dep
from torch._inductor.scheduler import BaseSchedulerNode
from torch._ops import OpOverload
from torch.fx import Graph, map_arg
from torch.fx import Node as FxNode
from torch.fx.experimental.symbolic_shapes import statically_known_true

_ATEN: Final = torch.ops.aten
_CAST: Final = torch.ops.prims.convert_element_type.default
_SUMS: Final = frozenset({_ATEN.sum.dim_IntList})
_REDUCTIONS: Final = _SUMS | {_ATEN.sum.default, _ATEN.mean.dim, _ATEN.amax.default}
_PRODUCTS: Final = frozenset({_ATEN.mm.default, _ATEN.bmm.default})
_LOW: Final = frozenset({torch.bfloat16, torch.float16})
# Pointwise ops without that tag: they cost nothing to compute again.
_FREE: Final = frozenset(
    {_ATEN.full.default, _ATEN.scalar_tensor.default, torch.ops.prims.iota.default}
)


def narrow_before_views(graph: Graph) -> None:
    """Cast a value to a low format before the views of it that are cast, instead of after.

    A product and the product with the transpose then read one low copy, and not two. Casts of
    the graph's inputs stay: parameters are cast again where they are read.
    """
    for node in graph.find_nodes(op="call_function", target=_CAST):
        views, source = list[FxNode](), _argument(node)
        while _is_view(source):
            views.append(source)
            source = _argument(source)
        if not _narrows(node) or not views or source.op == "placeholder":
            continue
        dtype: Any = node.args[1]
        with graph.inserting_before(node):
            low = _made(graph, _CAST, (source, dtype), like=source, dtype=dtype)
            for view in reversed(views):
                arguments = (low, *view.args[1:])
                low = _made(graph, view.target, arguments, like=view, dtype=dtype)
        node.replace_all_uses_with(low)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def compute_where_read(graph: Graph) -> None:
    """Have each op that Inductor writes a loop for compute again what follows from inputs.

    Inputs of a backward graph, what the forward pass saved, are in memory until their last
    reader. Pointwise ops between them and a reader are part of the reader's loop. A
    result that several loops share would be stored instead, often in fp32, from the first of
    them to the last, beside what it was computed from.
    Convolutions and products, which read memory, share one result. Law: an op reads no more
    bytes than before, but for values smaller than its result. No number changes.
    """
    inputs = _computable(graph)
    for node in list(graph.nodes):
        if node in inputs or not (_is_pointwise(node) or node.target in _REDUCTIONS):
            continue
        for source in node.all_input_nodes:
            if source in inputs:
                node.replace_input_with(source, _copied(graph, source, node, inputs.keys()))
    graph.eliminate_dead_code()


def _computable(graph: Graph) -> dict[FxNode, frozenset[FxNode]]:
    """Pointwise ops, with inputs of the graph that take no more bytes and give the result."""
    inputs: dict[FxNode, frozenset[FxNode]] = {}
    for node in graph.nodes:
        sources = node.all_input_nodes
        known = all(s in inputs or s.op == "placeholder" for s in sources)
        if node.op != "call_function" or not (sources and known and _is_pointwise(node)):
            continue
        read = frozenset[FxNode]().union(*(inputs.get(s, {s}) for s in sources))
        value = node.meta["val"]
        tensors = [t for s in read if isinstance(t := s.meta["val"], torch.Tensor)]
        large = [t for t in tensors if not statically_known_true(t.numel() < value.numel())]
        if statically_known_true(sum(map(_bytes, large)) <= _bytes(value)):
            inputs[node] = read
    return inputs


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, whose sizes may be symbols: ``nbytes`` refuses these."""
    return tensor.numel() * tensor.element_size()


def order_for_memory(graph: Graph) -> None:
    """Compute sums, then gradients of parameters, as soon as what they read is there."""
    for node in list(graph.nodes):
        if node.target in _PRODUCTS and _is_result(node):
            _move_up(node)
    for node in list(graph.nodes):
        if node.target in _SUMS:
            _compute_apart(graph, node)
            _move_up(node)
    # Inductor counts readers that nothing reads: it would store what has two.
    graph.eliminate_dead_code()
    graph.lint()


def order_kernels(kernels: Sequence[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """Kernels in the order of the graph, each as soon as all that it reads is there.

    Inductor runs a kernel of several ops where the first of them is in the graph, and before
    it whatever the others read. A sum that shares a kernel with a later one would so have the
    products between them computed first, whose operands are then all in memory at once.

    Args:
        kernels: Inductor's, each after those that it reads.
    """
    makers = {name: kernel for kernel in kernels for name in kernel.get_buffer_names()}
    places: dict[BaseSchedulerNode, int] = {}
    for kernel in kernels:
        read = (makers.get(d.name, kernel) for d in kernel.unmet_dependencies)
        places[kernel] = max([kernel.min_order, *(places.get(maker, 0) for maker in read)])
    return sorted(kernels, key=places.__getitem__)


def prevents_overwriting(kernels: Sequence[BaseSchedulerNode]) -> bool:
    """Whether one kernel in place of several could not write its result over what it reads.

    A loop that reads a value once, element by element, writes its result over the value if
    nothing reads that later: the gradient of the logits, in a low format, takes the place of
    the logits. A sum along another axis, the gradient of a bias, reads the same values. In one
    kernel with the loop it would need them until the end of that, and so would a sum that
    waits for another result of the kernel. On a CPU two kernels take as long as one, whose
    loops share nothing.
    """
    ops = [op for kernel in kernels for op in kernel.get_nodes()]
    names = {op.get_name() for op in ops}

    def needs_it_later(read: Dep, other: BaseSchedulerNode) -> bool:
        if other.get_name() not in names:
            return any(name in other.ancestors for name in names)
        accesses = other.read_writes.reads_and_writes()
        return any(access.name == read.name and access != read for access in accesses)

    return any(
        needs_it_later(read, other)
        for op in ops
        for read, others in _overwritten(op)
        for other in others
    )


def _overwritten(op: BaseSchedulerNode) -> Iterator[tuple[Dep, list[BaseSchedulerNode]]]:
    """What an op of Inductor's may write its result over, with all others that read that.

    These come before it in the graph.
    """
    scheduler = op.scheduler
    for read in filter(op.can_inplace, op.read_writes.reads):
        buffer = scheduler.name_to_donated_buffer.get(read.name)
        buffer = buffer or scheduler.name_to_buf.get(read.name)
        if buffer is None or not can_match_buffer_size(buffer.node, op.get_outputs()[0].node):
            continue
        others = [user.node for user in buffer.users if user.node is not op]
        earlier = [
            other
            for other in others
            if isinstance(other, BaseSchedulerNode) and other.min_order < op.min_order
        ]
        if earlier == others:
            yield read, earlier


def _move_up(node: FxNode) -> None:
    """Move an op directly after what it reads, and so the views that it alone reads."""
    for source in node.all_input_nodes:
        if len(source.users) == 1 and _is_view(source):
            _argument(source).append(source)
    max(node.all_input_nodes).append(node)


def _compute_apart(graph: Graph, node: FxNode) -> None:
    """Have a sum compute again what it reads, if all others read a low copy of that.

    Otherwise the value would be stored in fp32 for the sum, and low for a product. What is
    computed again are pointwise ops, which run inside the sum's own kernel. A value that
    others read in fp32, such as a residual's gradient, is stored in any case.
    """
    source = _argument(node)
    forms = [source]  # the value, as the views of it that the sum reads
    while _is_view(forms[-1]):
        forms.append(_argument(forms[-1]))
    readers = [user for form in forms for user in form.users if not _is_view(user)]
    in_fp32 = [user for user in readers if not _narrows(user)]
    stored = any(user.target not in _SUMS for user in in_fp32)
    if source.meta["val"].dtype in _LOW or stored or len(in_fp32) == len(readers):
        return
    pointwise = {n for n in graph.nodes if _is_pointwise(n)}
    # The low copy comes later, and the products that read it.
    node.args = (_copied(graph, source, source.next, pointwise), *node.args[1:])


def _copied(graph: Graph, value: FxNode, place: FxNode, ops: Container[FxNode]) -> FxNode:
    """``value`` computed again before ``place``, from the first values that ``ops`` lack."""
    copies: dict[FxNode, FxNode] = {}

    def copied(node: FxNode) -> FxNode:
        if node not in ops:
            return node
        if node not in copies:
            arguments, options = map_arg(node.args, copied), map_arg(node.kwargs, copied)
            with graph.inserting_before(place):
                copies[node] = graph.call_function(_called(node), arguments, options)
            copies[node].meta = dict(node.meta)
        return copies[node]

    return copied(value)


def _is_result(node: FxNode) -> bool:
    """Whether an op's result only is an output, or is cast or viewed to become one."""
    return all(
        user.op == "output" or ((user.target is _CAST or _is_view(user)) and _is_result(user))
        for user in node.users
    )


def _narrows(node: FxNode) -> bool:
    """Whether a node is a cast from fp32 to a low format."""
    return (
        node.target is _CAST
        and node.args[1] in _LOW
        and _argument(node).meta["val"].dtype is torch.float32
    )


def _is_view(node: FxNode) -> bool:
    """Whether a node is a view of all numbers of its argument."""
    target = node.target
    if not isinstance(target, OpOverload) or not (target.is_view and _is_tensor(node)):
        return False
    return node.meta["val"].numel() == _argument(node).meta["val"].numel()


def _is_tensor(node: FxNode) -> bool:
    """Whether a node gives one tensor; ``split`` gives a list of views."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_pointwise(node: FxNode) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or not _is_tensor(node):
        return False
    free = target is _CAST or target in _FREE or target.is_view
    return free or torch.Tag.pointwise in target.tags


def _argument(node: FxNode) -> FxNode:
    """The first argument of an op on a tensor."""
    source = node.args[0]
    assert isinstance(source, FxNode)
    return source


def _called(node: FxNode) -> Callable[..., Any]:
    target: Any = node.target
    return target


def _made(
    graph: Graph, target: Any, arguments: tuple[Any, ...], *, like: FxNode, dtype: torch.dtype
) -> FxNode:
    node = graph.call_function(target, arguments)
    node.meta = {**like.meta, "val": like.meta["val"].to(dtype)}
    return node
