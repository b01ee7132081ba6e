"""What an engine chose by itself, stated as a plan."""

from __future__ import annotations

from collections.abc import Sequence

from finecast.engines.base import KernelFormats
from finecast.graph import Graph, Node
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.assign import pick
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner


def stated(
    planner: Planner,
    kernels: Sequence[KernelFormats],
    fmt: Format,
    *,
    exact: bool = False,
) -> Plan:
    """The plan of ``fmt`` where the engine computes in it and the rules permit it.

    An engine may give the result of a product on low operands in fp32. A model states no such
    product: low, it rounds the result as well, which may be most of the plan's error.

    Args:
        planner: Makes plans.
        kernels: What the engine chose.
        fmt: The low format.
        exact: Whether such products stay fp32: more accurate than the engine's choice, and
            slower.
    """
    graph = planner.graph
    low = _low(graph, kernels, fmt, exact=exact)
    low = {n.id for n in graph.float_nodes if n.id in low or _stands_alone(graph, n, low)}
    formats = {
        number: pick(permission, *((fmt, Format.FP32) if number in low else (Format.FP32,)))
        for number, permission in planner.permissions.items()
    }
    return planner.plan(formats, f"what the engine's hint for {fmt.label} computes in it")


def _low(
    graph: Graph, kernels: Sequence[KernelFormats], fmt: Format, *, exact: bool
) -> set[int]:
    """Ids of the nodes whose result is one of ``fmt``, or of a product's operands in it.

    What follows a product in its kernel gets the unrounded sum: where the kernel's result is
    stored in fp32, that is an fp32 op. One that the engine left out, which costs nothing, goes
    with those it reads.
    """
    kernel_of = {name: kernel for kernel in kernels for name in kernel.ops}
    products = {n.name for n in graph.nodes if by_name(n.op).matmul_engine}
    low: set[int] = set()
    for node in graph.float_nodes:
        kernel = kernel_of.get(node.name)
        if kernel is None:
            made = [v.producer for v in graph.following_inputs(node) if v.constant is None]
            found = bool(made) and all(p in low for p in made)
        else:
            rounded = node.name in products and not exact
            behind = not rounded and not products.isdisjoint(kernel.ops)
            wide = behind and kernel.stored == Format.FP32.label
            found = kernel.computed == fmt.label and not wide
        if found:
            low.add(node.id)
    return low


def _stands_alone(graph: Graph, node: Node, low: set[int]) -> bool:
    """Whether what ``node`` reads and what reads it is low: fp32 for want of a kernel."""
    before = [v.producer for v in graph.following_inputs(node) if v.constant is None]
    after = [n for v in graph.following_outputs(node) for n in v.uses]
    ends = any(v.is_output for v in graph.following_outputs(node))
    return bool(before) and bool(after) and not ends and low.issuperset((*before, *after))
