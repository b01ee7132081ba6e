"""The decisions inside a model that its plan changes: which expert, which box, which class.

A decision is an integer or a bool that an op computes by comparing floats. The error of the
outputs says little of it: a router may send a token to another expert whose output is of the
same size. So decisions are output by the fp32 model and by the plan's, both run on the same
data.

Laws: only ops count that read, through any path, what an op in reduced precision computes of
the model's inputs. A mask of sizes, of constants or of integers is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from finecast.data.deviation import differing
from finecast.data.workload import samples
from finecast.engines.base import Array, Feeds, calls_of, feeds_for, outputs_of_calls
from finecast.engines.loading import exact_session, load_model
from finecast.frontends.prepared import AppliedModel
from finecast.graph import Graph, Node
from finecast.graph.structure import READS_SHAPE_ONLY
from finecast.native.acceptance import Pair
from finecast.native.artefact import Decisions
from finecast.numbers.formats import Format
from finecast.ops import OpKind, by_name
from finecast.planning.free_rows import FreeOutput, makes_rows, matched, rows_of

_MOST_OPS: Final = 64
"""Ops that are looked at, the first ones: what later ones decide mostly follows from these."""
MOST_SAMPLES: Final = 4096
"""Of as many decisions a share of 1% has a standard error of .16%."""
_MOST_BYTES: Final = 1 << 28
"""Bytes of one model's decisions that are kept while the other model runs."""
_DECIDES: Final = frozenset({OpKind.COMPARISON, OpKind.INDEX})


def deciding(graph: Graph, low: Iterable[int]) -> Iterator[Node]:
    """The ops outside of bodies that decide by floats which low ops, given by id, change."""
    low = frozenset(low)
    in_bodies = any(graph.nodes[n].region for n in low)
    fed = {v.id for v in graph.inputs}  # values that are computed of the inputs' numbers
    changed: set[int] = set()
    for node in graph.nodes:
        read = {i for i in node.input_ids if i in fed}
        kind = by_name(node.op).kind
        if node.op in READS_SHAPE_ONLY or not (read or node.region):
            continue
        is_low = node.id in low or (in_bodies and kind is OpKind.CONTROL)
        made = {*node.output_ids}
        fed |= made
        floats = {i for i in read if graph.values[i].format is not None}
        decides = kind in _DECIDES or _gives_positions(graph, node)
        if decides and not node.region and (floats if is_low else floats & changed):
            yield node
        if is_low or read & changed:
            changed |= made


def _gives_positions(graph: Graph, node: Node) -> bool:
    """Whether a maximum pooling says where it found the numbers, and that is read."""
    at = node.outputs[1] if node.op == "max_pool" and len(node.outputs) > 1 else None
    if at is None:
        return False
    return bool(graph.values[at].uses) or any(v.id == at for v in graph.outputs)


def changed_decisions(
    pair: Pair, batches: Callable[[], Iterable[Feeds]]
) -> tuple[Decisions, ...]:
    """The decisions of each op inside the model, the largest share of changes first.

    With further outputs an engine may fuse other ops: numbers may then differ in their last
    digits from those of the deployed model. A device that is not here computes as the model
    states.

    Args:
        pair: The fp32 model and the plan's.
        batches: The data, of which the first samples are run; called for each model.

    Raises:
        EngineError: If the engine cannot run the models with these outputs.
    """
    applied, formats = pair.built.applied, pair.built.plan.formats
    graph = applied.graph
    low = (n.id for n in graph.nodes if formats.get(n.name, Format.FP32) is not Format.FP32)
    nodes = {i: node for node in deciding(graph, low) for i in node.outputs}
    if not nodes:
        return ()
    shown = applied.observable(decisions=True)
    original = pair.original()
    known = original.observable(decisions=True)
    names = [n for n, i in shown.items() if i in nodes and n in known][:_MOST_OPS]
    if not names or next(iter(batches()), None) is None:
        return ()
    exact = [*_runs(pair, original, names, batches)]
    pairs = [*zip(_runs(pair, applied, names, batches), exact, strict=False)]
    decisions = (
        _compared(
            nodes[shown[name]],
            [(got[name], wanted[name]) for got, wanted in pairs],
            _free_rows(graph, shown[name]),
        )
        for name in names
    )
    return tuple(sorted(decisions, key=lambda one: -one.share))


def _runs(
    pair: Pair,
    model: AppliedModel,
    names: Sequence[str],
    batches: Callable[[], Iterable[Feeds]],
) -> Iterator[Mapping[str, Array]]:
    """The values called ``names`` of each call, up to a number of samples and of bytes."""
    native = model.with_outputs(names)
    emulated = pair.engine.emulates is not None
    session = exact_session(native) if emulated else load_model(pair.engine, native)
    rows = size_bytes = 0
    for feeds in batches():
        for call in outputs_of_calls(session, feeds_for(session, feeds)):
            size_bytes += sum(array.nbytes for array in call.values())
            yield call
        rows += sum(map(samples, calls_of(feeds)))
        if rows >= MOST_SAMPLES or size_bytes >= _MOST_BYTES:
            return


def _free_rows(graph: Graph, index: int) -> FreeOutput | None:
    """How the rows of a value lie; None if numbers do not decide how many there are."""
    value, maker = graph.values[index], graph.maker(index)
    return rows_of(graph, value) if maker and makes_rows(graph, maker) else None


def _compared(
    node: Node, calls: Sequence[tuple[Array, Array]], rows: FreeOutput | None = None
) -> Decisions:
    """The decisions of an op over all calls, each with the plan's model's and with fp32's."""
    call_counts = [_differing(node, got, wanted, rows) for got, wanted in calls]
    shapes = [wanted.shape for _, wanted in calls]
    count = sum(of for _, of in call_counts)
    alike = len({shape[1:] for shape in shapes}) == 1 and all(shapes)
    alike = alike and not any(_is_free(*pair, rows) for pair in calls)
    shape = (sum(s[0] for s in shapes), *shapes[0][1:]) if alike else (count,)
    return Decisions(
        node=node.name,
        op=node.native.rpartition("::")[2],
        changed=sum(changed for changed, _ in call_counts),
        count=count,
        shape=shape,
    )


def _differing(
    node: Node, got: Array, wanted: Array, rows: FreeOutput | None
) -> tuple[int, int]:
    """How many decisions of a call are others than fp32's, and how many there are.

    Of the largest k each row is one decision, of which the order does not count: a router
    sends a token to experts. Where the number of decisions depends on the data, a row (a box,
    the place of a number that is not 0) that has no partner counts.
    """
    if _is_free(got, wanted, rows):
        rows = rows or FreeOutput(name=node.name, axes=(), group=0)
        both = matched([rows], {rows.name: got}, {rows.name: wanted})
        largest = max(got.size, wanted.size)
        return both.changed(rows.name) if both.numbers else (largest, largest)
    if node.op == "top_k" and got.ndim:
        axis = node.attributes.get("axis", node.attributes.get("dim", -1))
        ours, theirs = (np.sort(_last(x, axis), axis=-1) for x in (got, wanted))
        # Rows that hold every index are an order, as of a sort, in which places count.
        if not (theirs == np.arange(theirs.shape[-1])).all():
            return int((ours != theirs).any(axis=-1).sum()), len(theirs)
    return differing(got, wanted) or 0, wanted.size


def _is_free(got: Array, wanted: Array, rows: FreeOutput | None) -> bool:
    """Whether the number of decisions depends on the data."""
    return bool(got.ndim) and (rows is not None or got.shape != wanted.shape)


def _last(array: Array, axis: object) -> Array:
    """The array as rows along an axis; by default the last one."""
    moved = np.moveaxis(array, axis if isinstance(axis, int) else -1, -1)
    return moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])
