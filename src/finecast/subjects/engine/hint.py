"""Models beside the tuned one: the fp32 model under an engine's hint, a quantized original."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from finecast.engines.base import Engine, KernelFormats
from finecast.errors import EngineError
from finecast.graph import Graph, Node
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.pipeline.subject import Built, Hinted
from finecast.planning.assign import pick
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.subjects.engine.native import Source


def original_model(source: Source, engine: Engine, planner: Planner) -> Built | None:
    """The quantized model that ``source`` was converted from, if ``engine`` runs it.

    Its plan is the one of fp32.
    """
    if source.original is None:
        return None
    try:
        loaded = engine.load(source.original)
    except EngineError:
        return None
    return Built(
        model=source.original,
        plan=planner.highest(),
        size_bytes=source.size_bytes,
        loaded=loaded,
        stays_loaded=True,
    )


def hinted_models(source: Source, engine: Engine, planner: Planner) -> Iterator[Hinted]:
    """The model under the hint for each format of the policy, where it lowers anything."""
    for fmt in planner.policy.formats if engine.lowers_by_hint else ():
        try:
            session = engine.load_hinted(source.loadable, fmt)
        except EngineError:
            continue
        kernels = session.kernel_formats()
        plan = stated(planner, kernels, fmt)
        if plan.lowers:
            yield Hinted(
                model=source.model,
                plan=plan,
                size_bytes=source.size_bytes,
                format=fmt,
                exact=stated(planner, kernels, fmt, exact=True),
                loaded=session,
            )


def stated(
    planner: Planner,
    kernels: Sequence[KernelFormats],
    fmt: Format,
    *,
    exact: bool = False,
) -> Plan:
    """The plan with ``fmt`` where the engine computes in it and the rules permit it.

    An engine may multiply low operands and give the result in fp32, which no model can state:
    a low product in a model rounds its result, too, and that may be most of the plan's error.

    Args:
        planner: Makes plans.
        kernels: The formats of the engine's kernels under the hint.
        fmt: The low format.
        exact: Whether such products stay fp32, which is more accurate than the engine's
            choice, and slower.
    """
    graph = planner.graph
    low = _low(graph, kernels, fmt, exact=exact)
    low = {n.id for n in graph.float_nodes if n.id in low or _between_low(graph, n, low)}
    formats = {
        number: pick(permission, *((fmt, Format.FP32) if number in low else (Format.FP32,)))
        for number, permission in planner.permissions.items()
    }
    hint = f"the engine's hint for {fmt.label}"
    return planner.plan(formats, f"{hint} lowers it", kept=f"{hint} keeps it in fp32")


def _low(
    graph: Graph, kernels: Sequence[KernelFormats], fmt: Format, *, exact: bool
) -> set[int]:
    """Ids of nodes that compute in ``fmt``, a product by its operands, others by their result.

    An op behind a product in the same kernel reads the unrounded sum; if the kernel stores its
    result in fp32, it is an fp32 op. An op without a kernel, which takes no time, has the
    format of those whose results it reads.
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
            is_fp32 = behind and kernel.stored == Format.FP32.label
            found = kernel.computed == fmt.label and not is_fp32
        if found:
            low.add(node.id)
    return low


def _between_low(graph: Graph, node: Node, low: set[int]) -> bool:
    """Whether all ops around ``node`` are low: the engine merely lacks a low kernel for it."""
    before = [v.producer for v in graph.following_inputs(node) if v.constant is None]
    after = [n for v in graph.following_outputs(node) for n in v.uses]
    ends = any(v.is_output for v in graph.following_outputs(node))
    return bool(before) and bool(after) and not ends and low.issuperset((*before, *after))
