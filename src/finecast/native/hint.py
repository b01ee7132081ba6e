"""An engine's precision hint: what the engine lowers under it, and plans that it states.

Under the hint an fp32 model stands beside the tuned one, as does the model that it was made
from, quantized by another tool. A plan that is stated by the hint leaves the model in fp32,
without casts, and marks the ops that keep fp32: under the hint the engine puts casts of its
own, so that the model gets the kernels that the engine has under its hint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from finecast.engines.base import Engine, KernelFormats, Session
from finecast.errors import EngineError, UsageError
from finecast.frontends.prepared import PreparedModel
from finecast.graph import Graph, Node
from finecast.native.source import Source
from finecast.native.subject import Built, Hinted
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner, pick
from finecast.rules.policy import Policy


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

    With ``exact`` such products stay fp32, which is more accurate than the engine's choice,
    and slower.
    """
    graph = planner.graph
    low = _low(graph, kernels, fmt, exact=exact)
    low = {n.id for n in graph.float_nodes if n.id in low or _between_low(graph, n, low)}
    formats = {
        number: pick(permission, *((fmt, Format.FP32) if number in low else (Format.FP32,)))
        for number, permission in planner.permissions.items()
    }
    hint = f"the engine's hint for {fmt.label}"
    return planner.plan(formats, f"{hint} sets it", kept=f"{hint} keeps it in fp32")


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
            producers = [
                v.producer for v in graph.following_inputs(node) if v.constant is None
            ]
            is_low = bool(producers) and all(p in low for p in producers)
        else:
            rounded = node.name in products and not exact
            behind = not rounded and not products.isdisjoint(kernel.ops)
            is_fp32 = behind and kernel.stored == Format.FP32.label
            is_low = kernel.computed == fmt.label and not is_fp32
        if is_low:
            low.add(node.id)
    return low


def _between_low(graph: Graph, node: Node, low: set[int]) -> bool:
    """Whether all ops around ``node`` are low: the engine merely lacks a low kernel for it."""
    before = [v.producer for v in graph.following_inputs(node) if v.constant is None]
    after = [n for v in graph.following_outputs(node) for n in v.uses]
    ends = any(v.is_output for v in graph.following_outputs(node))
    return bool(before) and bool(after) and not ends and low.issuperset((*before, *after))


def hint_formats(engine: Engine, prepared: PreparedModel) -> Collection[Format]:
    """Formats whose hint in ``engine`` the model can be made for."""
    return (prepared.hints or ()) if engine.lowers_by_hint else ()


def check_by_hint(policy: Policy, engine: Engine, prepared: PreparedModel) -> None:
    """Raise UsageError if plans of ``policy`` cannot be stated by a hint and marks."""
    known = prepared.hints
    if known is None or not engine.lowers_by_hint:
        raise UsageError(
            f"this model of {prepared.library} cannot be made for a precision hint of"
            f" {engine.title}, with marks on the ops that keep fp32",
            where="--by-hint",
            fix="write OpenVINO's IR, -o NAME.xml, without --target",
        )
    if not known:
        raise UsageError(
            "the model has ops in reduced precision or quantized, and a precision hint is"
            " for models in fp32",
            where="--by-hint",
            fix="give the model in fp32, or leave --by-hint out",
        )
    floats = [fmt for fmt in policy.formats if not fmt.has_scales]
    if len(floats) != 1 or floats[0] not in known:
        raise UsageError(
            "a precision hint has one format beside quantized integers",
            where="--by-hint",
            fix=f"give --auto-cast-type {' or '.join(f.label for f in known)}",
        )
    if policy.retypes_ports:
        raise UsageError(
            "inputs and outputs keep their types under a precision hint",
            where="--by-hint",
            fix="leave --io out",
        )


def by_hint(engine: Engine, prepared: PreparedModel, plan: Plan) -> Plan | None:
    """``plan`` stated by a hint and marks; None if it cannot be, or is so already.

    Nor is it where the engine computes in fp32 under the hint, as OpenVINO does on CPUs
    without bf16 kernels: such a plan would lower nothing.
    """
    stays = plan.io or (plan.adjustments and not plan.encodings)
    # Kernels that round values read them in fp32.
    rounds = any(f.dynamic_group is not None for f in plan.low_formats)
    if plan.by_hint or stays or rounds or len(plan.low_floats) != 1:
        return None
    if plan.kv_cache is not Format.FP32 and not plan.kv_cache.has_scales:
        return None  # under a hint the cache has its type, or codes
    (low,) = plan.low_floats
    if low not in hint_formats(engine, prepared) or engine.capability(low).in_fp32:
        return None
    return replace(plan, by_hint=True)


def check_marks(plan: Plan, graph: Graph, session: Session) -> None:
    """Check that the engine computes in fp32 what ``plan``, by its hint, has in fp32.

    An engine's passes may lose the marks of ops that they replace. A kernel may compute low
    that has ops of both, as long as no product is among those in fp32.

    ``session`` is the model that it gives, loaded with the names of its kernels.

    Raises:
        EngineError: If it does not, or does not show it; names the first op.
    """
    kernels = session.kernel_formats() if plan.by_hint and plan.low_floats else ()
    if not kernels:
        return
    (low,) = plan.low_floats
    fp32 = {d.node: by_name(d.op) for d in plan.decisions if d.format is Format.FP32}
    in_bodies = (n.name for n in graph.nodes if n.region)
    hidden = next((n for n in in_bodies if n in fp32 and not fp32[n].exact), None)
    if hidden is not None:
        raise _lost(
            f"{hidden!r} is planned in fp32 in a body of control flow, where the engine does"
            " not show whether its mark is kept"
        )
    formats = plan.formats
    for kernel in kernels:
        kept = [n for n in kernel.ops if n in fp32 and not fp32[n].exact]
        alone = all(n in fp32 or n not in formats for n in kernel.ops)
        lost = next((n for n in kept if alone or fp32[n].matmul_engine), None)
        if lost is not None and kernel.computed == low.label:
            raise _lost(
                f"{lost!r} is planned in fp32 and runs in {low.label}: its mark is lost there"
            )


def _lost(what: str) -> EngineError:
    return EngineError(
        what,
        fix="leave --by-hint out: casts can express this plan; or let that op be in reduced"
        " precision",
    )
