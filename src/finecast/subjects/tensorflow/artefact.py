"""Writing a converted model: loaded and run before it takes its name.

Law: at the output path there is either what was there before or a SavedModel that TensorFlow
serves; nothing half-written stays.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from finecast.data.deviation import LIMIT, deviation, expected
from finecast.engines.base import Array, Feeds
from finecast.engines.tensorflow import NAME, TensorFlowEngine
from finecast.errors import EngineError, UsageError, WrongNumbersError
from finecast.files import check_writable_folder, folder_bytes, publish_folder
from finecast.frontends.tensorflow import FrozenModel
from finecast.frontends.tensorflow.loading import GRAPH_FILE, load
from finecast.frontends.tensorflow.saving import save
from finecast.graph import Graph
from finecast.pipeline.artefact import Destination, Verified, compare
from finecast.planning.plan import Plan
from finecast.subjects.tensorflow.source import TensorFlowBuilt, TensorFlowSource


def write(
    source: TensorFlowSource, built: TensorFlowBuilt, output: Destination, feeds: Feeds | None
) -> tuple[int, Verified]:
    """Put the model at its destination; its bytes on disk, and how it was verified.

    Args:
        source: The fp32 model.
        built: What a plan gave of it.
        output: Where it goes; without a path it is verified in memory.
        feeds: What both are run on; None to write it unverified.

    Raises:
        UsageError: If the output cannot be written.
        WrongNumbersError: If the formats do not explain what it gives.
        EngineError: If TensorFlow cannot run it.
    """
    model = built.model
    if output.path is None:
        return model.size_bytes, verify(source, model, built.plan, feeds)
    notes = {"plan": built.plan.digest, "policy": built.plan.policy}
    kept = {} if not built.applied.edits else notes
    verified: list[Verified] = []

    def staged(folder: Path) -> None:
        save(model, folder, kept)
        written = load(folder) if feeds is not None else model
        verified.append(verify(source, written, built.plan, feeds))

    publish(staged, output.path, force=output.force)
    return folder_bytes(output.path), verified[0]


def publish(make: Callable[[Path], None], path: Path, *, force: bool) -> None:
    """Let ``make`` write a SavedModel beside ``path``, then give it that name.

    Raises:
        UsageError: If it cannot be written there.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".finecast-") as at:
            staged = Path(at) / path.name
            make(staged)
            check_writable_folder(path, GRAPH_FILE, force=force)
            publish_folder(staged, path)
    except OSError as error:
        raise UsageError(
            f"cannot write the output: {error.strerror}", where=str(path)
        ) from error


def verify(
    source: TensorFlowSource, model: FrozenModel, plan: Plan, feeds: Feeds | None
) -> Verified:
    """Run the fp32 model and the converted one.

    Raises:
        WrongNumbersError: If there are NaN or Inf where fp32 has none, or no digit is right.
        EngineError: If TensorFlow cannot run one of them.
    """
    if feeds is None:
        return Verified(engine=None, note="not run: no engine was asked to")
    engine = TensorFlowEngine()
    try:
        wanted = engine.open(source.model).run(feeds)
    except EngineError as error:
        # The fp32 model refuses these feeds: they say nothing about the converted one.
        engine.open(model)
        return Verified(engine=NAME, note=f"loaded, not run: give --data: {error.what}")
    got = engine.open(model).run(feeds)
    _check_digits(source.captured.graph, plan, got, wanted)
    return compare(NAME, [got[n] for n in wanted], [*wanted.values()])


def _check_digits(
    graph: Graph, plan: Plan, got: Mapping[str, Array], wanted: Mapping[str, Array]
) -> None:
    ids = {n.name: n.id for n in graph.nodes}
    bounds = expected(graph, {ids[n]: f for n, f in plan.formats.items()})
    outputs = {v.name: v.id for v in graph.outputs}
    for name, reference in wanted.items():
        found, index = deviation(got[name], reference), outputs.get(name)
        if index in bounds.decided or index is None or found.nonfinite:
            continue
        if found.relative >= max(LIMIT, bounds.relative.get(index, 0.0)):
            raise WrongNumbersError(
                f"output {name!r} has a relative error of {found.relative:.3g}: no digit of"
                " it is right",
                fix="keep ops in fp32 by --exclude or --op NAME=fp32, or use `tune`",
            )
