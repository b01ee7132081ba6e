"""Ops that a plan puts on codes, and that the engine computes otherwise.

Engines fuse quantize and dequantize nodes into integer kernels by patterns of their own. Where
no pattern fits they compute in fp32 between the roundings, or from widened weights, without a
message: slower than fp32 and less exact. So every such plan is checked against the kernels
that ran.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import numpy as np

from finecast.data.deviation import deviation
from finecast.engines.base import (
    Array,
    Engine,
    Feeds,
    KernelFormats,
    KernelTime,
    Loadable,
    Session,
    calls_of,
)
from finecast.engines.exact import Exact
from finecast.engines.integers import INTEGERS, fuses, not_as_planned
from finecast.engines.loading import from_memory, load_model
from finecast.errors import EngineError, Unfit, UsageError
from finecast.frontends.prepared import AppliedModel
from finecast.graph import Graph, Node
from finecast.naming import number_of
from finecast.native.source import Source
from finecast.numbers.encodings import Dynamic, Encodings, Stored
from finecast.numbers.formats import Format
from finecast.numbers.thresholds import LIMIT, excused
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.plugin import title_of
from finecast.rules.policy import Policy
from finecast.rules.quantized import quantized_notes
from finecast.rules.ranges import Calibration
from finecast.rules.scaled_operands import origin, products_of_values, summed

_GIVE_INPUTS: Final = "give some of the model's inputs: --data calib.npz (data=...)"
# Each search for ops with which an engine does not load a model loads it so often at most.
_MOST_ATTEMPTS: Final = 64
# Each turn drops ops, and the engine fuses the others anew: more turns have not been needed.
_MOST_TURNS: Final = 4


def quantized_mismatch(
    graph: Graph,
    engine: str,
    got: Mapping[str, Array],
    exact: Callable[[], Mapping[str, Array]],
    first: str = "",
) -> str:
    """A note if ``engine`` computes a model that came quantized wrongly; else empty.

    OpenVINO does so with convolutions of signed codes (``openvino-signed-codes``).

    ``exact`` gives the outputs by the definitions of the ops; called for quantized models.
    ``first`` is what the user has to do before the remedy.
    """
    if not quantized_notes(graph):
        return ""
    wanted = exact()
    errors = (deviation(got[name], array).relative for name, array in wanted.items())
    worst = max(errors, default=0.0)
    if worst < LIMIT:
        return ""
    return (
        f"{title_of(engine)} computes the quantized model otherwise than its ops say"
        f" (relative error {worst:.2g}): {first}run it in another engine, or plan it anew"
        " by --from-type int8"
    )


def check_calibrated(policy: Policy, data: Sequence[Feeds]) -> None:
    """Check that there are data to choose scales by, if a format of ``policy`` needs them.

    Raises:
        UsageError: If there are none.
    """
    for what in unranged(policy, data):
        raise UsageError(what, where="--auto-cast-type", fix=_GIVE_INPUTS)
    if policy.calibration is Calibration.GPTQ and not data:
        raise UsageError(
            "gptq chooses integers by the values that weights meet, and there is no data",
            where="--calibration",
            fix=_GIVE_INPUTS,
        )


def unranged(policy: Policy, data: Sequence[Feeds]) -> tuple[str, ...]:
    """What is said of formats of ``policy`` whose scales need data where there are none."""
    formats = () if data else (f for f in policy.formats if f.needs_ranges)
    return tuple(
        f"{fmt.label} needs the ranges of the model's values, and there is no data"
        for fmt in formats
    )


def not_run(engine: Engine, plan: Plan) -> tuple[str, ...]:
    """What is said of a plan by the rules alone, which the engine may not run as planned.

    ``drop_unfit`` finds such ops, and takes several loads of the model for it.
    """
    labels = {f.label for f in plan.formats.values() if fuses(engine.name, f)}
    return tuple(
        f"{number_of(count, 'op')} in {label} by what the rules permit: convert and tune also"
        f" run the model in {engine.title}, and take ops out of {label} that it does not run"
        " so"
        for label, count in plan.counts.items()
        if label in labels
    )


def drop_unfit(source: Source, planner: Planner, engine: Engine, feeds: Feeds) -> Planner:
    """``planner`` without ops that the engine does not run in a scaled format as planned.

    It does not fuse them into kernels of the format, or cannot load the model with them. They
    are found by runs of the lowest plan in each format, and of that in all formats: beside
    bf16 a kernel of attention does not run in int8, for example. An emulated device has no
    kernels to check.

    Raises:
        EngineError: If the engine cannot run the lowest plan in a format, and no op is at
            fault, or one that the user left no other format.
    """
    formats = planner.policy.formats
    fused = [fmt for fmt in formats if fuses(engine.name, fmt)]
    for fmt in fused:
        planner = _running(source, planner, engine, feeds, (fmt,))
    if fused and len(formats) > 1:
        with suppress(EngineError):  # of the other formats, which verification reports
            planner = _running(source, planner, engine, feeds, formats)
    return planner


def _running(
    source: Source,
    planner: Planner,
    engine: Engine,
    feeds: Feeds,
    formats: tuple[Format, ...],
) -> Planner:
    """``planner`` once the engine runs its lowest plan in ``formats`` as planned."""
    for _ in range(_MOST_TURNS):
        plan = planner.lowest(*formats)
        applied = source.build(plan).applied
        try:
            failed = _misrun(engine, plan, applied, feeds)
        except EngineError as error:
            failed = _refused(source, planner, plan, engine, error.what)
            if not failed:
                raise error from None
        if not failed:
            break
        planner = planner.without(failed)
    return planner


def _refused(source: Source, planner: Planner, plan: Plan, engine: Engine, why: str) -> Unfit:
    """Ops of ``plan`` without whose formats ``engine`` loads its model, and why, by name.

    Engines rewrite quantized models, and may fail at a single op of a valid one, or at one
    beside another: OpenVINO moves scales across ops that change shapes, and beside codes it
    mixes up the types of a normalization in bf16. So the ops in 16-bit formats are tried
    first, as less is lost with them than with codes. Empty if nothing is shown by either.
    ``why`` is what the engine says.
    """
    coded = [name for name, fmt in plan.formats.items() if fuses(engine.name, fmt)]
    stored = [
        node.name
        for node in planner.graph.float_nodes
        if node.name not in coded
        and plan.formats[node.name] is not Format.FP32
        and Format.FP32 in planner.permissions[node.id].formats
    ]
    for suspects in (s for s in (stored, coded) if s):
        found = _at_fault(source, planner.graph, plan, engine, suspects)
        if found:
            does = f"refuses the model with it: {why}"
            return {name: (plan.formats[name].label, does) for name in found}
    return {}


def _at_fault(
    source: Source, graph: Graph, plan: Plan, engine: Engine, suspects: list[str]
) -> list[str]:
    """Those of ``suspects`` without whose formats ``engine`` loads the model of ``plan``.

    By bisection: with the suspects before such an op in their formats, and those after it in
    fp32, the model loads. A net repeats its layers: of the second op at fault between ops of
    the same kinds, all others between such ops count as at fault, too. Where that takes too
    many attempts, all ops of the kinds found so far do. Empty if the model does not load
    without them.
    """
    attempts, ops = 0, {d.node: d.op for d in plan.decisions}
    roles = {node.name: _role(graph, node) for node in graph.nodes}

    def loads(kept: Collection[str]) -> bool:
        nonlocal attempts
        attempts += 1
        raised = {*suspects}.difference(kept)
        decisions = (
            replace(d, format=Format.FP32, encodings=Encodings()) if d.node in raised else d
            for d in plan.decisions
        )
        try:
            model = source.build(replace(plan, decisions=tuple(decisions))).model
            from_memory(model, engine.load_tried)
        except EngineError:
            return False
        return True

    found: list[str] = []
    if not loads(()):
        return found
    remaining = [*suspects]
    loading = 0  # so many of the first of ``remaining`` load together
    while not loads(remaining):
        high = len(remaining)
        while high - loading > 1:
            middle = (loading + high) // 2
            if loads(remaining[:middle]):
                loading = middle
            else:
                high = middle
        name = remaining.pop(loading)
        if any(roles[one] == roles[name] for one in found):
            loading = sum(roles[one] != roles[name] for one in remaining[:loading])
            remaining = [one for one in remaining if roles[one] != roles[name]]
        found.append(name)
        if attempts > _MOST_ATTEMPTS:
            kinds = {ops[name] for name in found}
            others = [name for name in remaining if ops[name] not in kinds]
            return [name for name in suspects if name not in others] if loads(others) else []
    return [name for name in suspects if name not in remaining]


def _role(graph: Graph, node: Node) -> tuple[object, ...]:
    """The kinds of an op, of those whose results it reads, and of those that read its own."""
    makers = (graph.maker(index) for index in node.input_ids)
    results = (graph.values[index] for index in node.output_ids)
    readers = (reader.op for value in results for reader in graph.readers(value))
    return node.op, tuple(maker and maker.op for maker in makers), tuple(readers)


def unfused(
    engine: Engine,
    plan: Plan,
    applied: AppliedModel,
    feeds: Feeds,
    session: Session | None = None,
) -> dict[str, str]:
    """Ops that ``plan`` puts in a scaled format, and the format that they ran in, by name.

    An engine that tells its kernels is asked by ``session``, the loaded model, if there is
    one; others tell them by a profile on ``feeds``.

    Raises:
        EngineError: If the engine cannot run the model.
    """
    planned = {name: fmt for name, fmt in plan.formats.items() if fuses(engine.name, fmt)}
    if not planned:
        return {}
    if engine.lowers_by_hint:
        if session is None:
            session = from_memory(applied.model, engine.load_tried)
            session.run(feeds)
        kernels = session.kernel_formats()
        failed = not_as_planned([*map(_without_time, kernels)], planned)
        return failed | reading_floats(applied.graph, kernels, planned)
    return not_as_planned(kernels_of(engine, applied.model, feeds, repeats=1), planned)


def reading_floats(
    graph: Graph, kernels: Iterable[KernelFormats], planned: Mapping[str, Format]
) -> dict[str, str]:
    """Products of two values in kernels that read too few values as codes, with "fp32".

    A kernel of attention runs two such products, the second on what became of the first's
    result, and tells a single format: that of the narrowest value that it reads.
    """
    products = (graph.nodes[i] for i in sorted(graph.once(products_of_values)))
    names = {node.name: node for node in products}
    coded = [n for n in names if n in planned and planned[n].runs_on_codes]
    failed: dict[str, str] = {}
    for kernel in (k for k in kernels if k.reads):
        codes = sum(label in INTEGERS for label in kernel.reads)
        for name in (n for n in coded if n in kernel.ops):
            values = (graph.read(names[name], index) for index in (0, 1))
            makers = [graph.maker(origin(graph, v)) for v in values if v is not None]
            needed = sum(m is None or m.name not in kernel.ops for m in makers)
            if needed > codes:
                failed[name] = Format.FP32.label
            else:
                codes -= needed
    return failed


def not_rounded(
    engine: Engine, plan: Plan, applied: AppliedModel, feeds: Feeds
) -> dict[str, str]:
    """Ops whose kernels round what they read where the plan has it exact, or the reverse.

    Engines do not tell whether a kernel rounds the values that it reads. So operands and
    results of products by constant codes are shown, and each result is compared with both
    products: that of the exact operand, and that of the rounded one. By name, with what ran.

    Raises:
        EngineError: If the engine cannot run the model with these outputs.
    """
    rounded = {
        name: how
        for name, encodings in plan.encodings.items()
        for how in encodings.operands.values()
        if isinstance(how, Dynamic) and fuses(engine.name, how.format)
    }
    if not rounded:
        return {}
    usual = next(iter(rounded.values()))
    feeds = calls_of(feeds)[0]
    graph, known = applied.graph, {n.name: n for n in applied.graph.nodes}
    shown = {value: name for name, value in applied.observable().items()}
    inputs = {v.id: feeds[v.name] for v in graph.inputs if v.name in feeds}
    products: dict[str, tuple[Node, Stored]] = {}
    for name, encodings in plan.encodings.items():
        node = known[name]
        weights = encodings.constants.get(1)
        read, result = node.inputs[0], node.outputs[0]
        whole = not (summed(graph, node) or 1) % rounded.get(name, usual).group
        if weights is not None and whole and result in shown and {read} & {*shown, *inputs}:
            products[name] = node, weights
    if not products:  # an earlier conversion stored all of these constants
        return {}
    ends = (v for node, _ in products.values() for v in (node.inputs[0], node.outputs[0]))
    names = dict.fromkeys(shown[v] for v in ends if v is not None and v in shown)
    outputs = from_memory(applied.with_outputs([*names]), engine.load_tried).run(feeds)
    arrays = inputs | {value: outputs[name] for value, name in shown.items() if name in names}
    failed: dict[str, str] = {}
    for name, (node, weights) in products.items():
        read, result = node.inputs[0], node.outputs[0]
        assert read is not None
        assert result is not None
        how = rounded.get(name, usual)
        rounds = _rounds(graph, node, weights, (arrays[read], arrays[result]), how)
        if rounds is not (name in rounded):
            kind = "rounds" if rounds else "does not round"
            failed[name] = f"a kernel that {kind} what it reads"
    return failed


# Rows of an operand that are multiplied here, to see what a kernel made of them.
_ROWS_COMPARED: Final = 16


def _rounds(
    graph: Graph,
    node: Node,
    weights: Stored,
    ran: tuple[Array, Array],
    how: Dynamic,
) -> bool:
    """Whether the result of a product is nearer to that of the rounded operand.

    ``ran`` are the operand and the result; a bias that the op adds is left out of both
    products, as the mean difference by column.
    """
    value = graph.read(node, 1)
    assert value is not None
    assert value.constant is not None
    matrix = weights.round(value.constant.read().astype(np.float32))
    matrix = matrix.T if node.op == "linear" or node.attributes.get("transB") else matrix
    x, y = (a.reshape(-1, a.shape[-1])[:_ROWS_COMPARED].astype(np.float32) for a in ran)
    bias = graph.read(node, 2)
    if bias is not None and bias.constant is not None:
        y = y - bias.constant.read().astype(np.float32)
    exact, rounded = (np.linalg.norm(y - one @ matrix) for one in (x, how.round(x)))
    return bool(rounded < exact)


def kernels_of(
    engine: Engine, model: Loadable, feeds: Feeds, *, repeats: int = 5
) -> list[KernelTime]:
    """The kernels of a model, by ``repeats`` runs of it with ``feeds``, the slowest first.

    Profiles leave out some kernels that take less than a microsecond, in some runs: these are
    added by what the engine tells of its kernels without times, with a time of 0.

    Raises:
        EngineError: If the engine cannot run the model.
    """
    session = load_model(engine, model, profiling=True)
    timed = session.profile(feeds, repeats=repeats)
    known = {op for kernel in timed for op in kernel.ops}
    untimed = [k for k in session.kernel_formats() if known.isdisjoint(k.ops)]
    return [*timed, *map(_without_time, untimed)]


def _without_time(kernel: KernelFormats) -> KernelTime:
    return KernelTime(
        kernel="",
        kind="",
        ops=kernel.ops,
        format=kernel.computed,
        time_s=0.0,
        constants=kernel.constants,
    )


def check_on_integers(
    engine: Engine,
    plan: Plan,
    applied: AppliedModel,
    feeds: Feeds,
    session: Session | None = None,
) -> None:
    """Check that every op that ``plan`` puts in a scaled format runs so in ``engine``.

    The arguments are those of ``unfused``.

    Raises:
        EngineError: If one does not; names the first.
    """
    unfit = _misrun(engine, plan, applied, feeds, session)
    for name, (label, does) in unfit.items():
        raise EngineError(
            f"{name!r} is planned in {label} and {engine.title} {does}",
            fix="keep it in fp32 by --exclude",
            unfit=unfit,
        )


def _misrun(
    engine: Engine,
    plan: Plan,
    applied: AppliedModel,
    feeds: Feeds,
    session: Session | None = None,
) -> Unfit:
    """Ops that ``plan`` puts in a scaled format and that do not run so in ``engine``."""
    failed = unfused(engine, plan, applied, feeds, session)
    failed = failed or not_rounded(engine, plan, applied, feeds)
    return {
        name: (plan.formats[name].label, f"runs it in {ran} all the same")
        for name, ran in failed.items()
    }


def check_on_one_thread(
    engine: Engine, model: Loadable, session: Session, exact: Exact
) -> None:
    """Check that a model on codes is as exact on one thread as on all.

    Engines choose kernels by the number of threads, and some kernels on codes are wrong.

    ``session`` is the model on all threads.

    Raises:
        EngineError: If an output is far less exact so, or the model does not run.
    """
    one_thread = engine.on_one_thread()
    if one_thread is None:
        return
    alone = exact.errors(from_memory(model, one_thread.load_tried))
    usual = exact.errors(session)
    for name, error in alone.items():
        if error > excused(usual[name]):
            raise EngineError(
                f"on one thread {engine.title} computes output {name!r} of a plan with a"
                f" relative error of {error:.2g}, on all threads with {usual[name]:.2g}",
                fix="keep ops in fp32 by --exclude",
            )
