"""The TensorFlow frontend: a graph of TensorFlow's and a plan in, one in low formats out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from finecast.frontends.prepared import ModelLibrary, PreparedAsIs
from finecast.frontends.replaying import check_made_for, edits_of, resolve_io
from finecast.frontends.saved_notes import converted_to
from finecast.frontends.tensorflow import instrument
from finecast.frontends.tensorflow.library import DTYPES
from finecast.frontends.tensorflow.model import FrozenModel, SignaturePort, with_sizes
from finecast.frontends.tensorflow.reader import GraphBinding, read
from finecast.frontends.tensorflow.undo import before_conversion, noted
from finecast.frontends.tensorflow.writer import apply_edits
from finecast.graph import Dim, Graph
from finecast.planning.edits import Edit
from finecast.planning.plan import Plan
from finecast.rules.matching import check_names
from finecast.rules.policy import Policy, Scope, conversion_stays

__all__ = [
    "FrozenModel",
    "SignaturePort",
    "TensorFlowApplied",
    "TensorFlowFile",
    "TensorFlowPrepared",
    "apply",
    "capture",
    "input_shapes",
    "prepare",
    "roundable",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFlowFile:
    """A model as it was read, with its neutral graph; neither is ever changed.

    Attributes:
        path: Its file or folder; of a model in memory a name that no file has.
        name: What messages call it.
        model: The model.
        graph: Its graph.
        binding: What of the model the graph's ids stand for.
        original: The model as it was before an earlier conversion, if there was one.
        external: Files other than ``path``: there are none.
        told: What was chosen of it as it was read: nothing.
    """

    path: Path
    name: str
    model: FrozenModel
    graph: Graph = field(repr=False)
    binding: GraphBinding = field(repr=False)
    original: TensorFlowFile | None = None
    external: tuple[Path, ...] = ()
    told: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Of the model as its conversion is written: weights, and the graph of their ops.

        Its own files have more in them: Keras's files their variables twice, a SavedModel
        every function of the layers.
        """
        return self.model.size_bytes

    @property
    def digest(self) -> str:
        """Of all its files, or of the graph where there are none."""
        return self.graph.digest

    @property
    def converted(self) -> str:
        """The policy of an earlier conversion; empty if there was none."""
        return converted_to(self.model.notes)


_LIBRARY: Final = ModelLibrary(name="TensorFlow", types=DTYPES, states=DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFlowPrepared(PreparedAsIs):
    """A model ready to be planned, and the copies of it that show and round its values."""

    file: TensorFlowFile
    of: ModelLibrary = _LIBRARY

    def observable(self) -> dict[str, int]:
        """Names, for ``with_outputs``, of the values that can be shown, and their ids."""
        return instrument.observable(self.graph, self.file.binding)

    def with_outputs(self, names: Sequence[str]) -> FrozenModel:
        """A copy whose outputs are just the values called ``names``."""
        return instrument.with_outputs(self.file.model, names)

    def roundable(self) -> instrument.TensorFlowRoundable:
        """A copy whose values can be rounded."""
        return instrument.TensorFlowRoundable(self.graph, self.file.binding)

    def static_shapes(self, inputs: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Shapes of observable values, as far as TensorFlow infers them from the inputs'."""
        graph, binding = read(with_sizes(self.file.model, inputs))
        return graph.static_shapes(instrument.observable(graph, binding))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFlowApplied:
    """The model that a plan gives, and the edits that made it."""

    model: FrozenModel
    graph: Graph
    binding: GraphBinding
    edits: tuple[Edit, ...]

    @property
    def restated(self) -> tuple[()]:
        """Ops are stated as they are."""
        return ()

    def observable(self) -> dict[str, int]:
        """Ids of the float values that can be shown, by names for ``with_outputs``."""
        kept = {node.name for node in self.model.graph.node}
        shown = instrument.observable(self.graph, self.binding)
        return {name: i for name, i in shown.items() if name.partition(":")[0] in kept}

    def with_outputs(self, names: Sequence[str]) -> FrozenModel:
        """A copy whose outputs are just the values called ``names``."""
        return instrument.with_outputs(self.model, names)


def capture(model: FrozenModel, digest: str, *, path: Path = Path("model")) -> TensorFlowFile:
    """The model with its graph; ``digest`` identifies it in plans."""
    graph, binding = read(model, digest)
    before: TensorFlowFile | None = None
    if converted_to(model.notes):
        before = capture(before_conversion(graph, binding), digest, path=path)
    return TensorFlowFile(
        path=path,
        name=str(path),
        model=model,
        graph=graph,
        binding=binding,
        original=before,
    )


def prepare(file: TensorFlowFile, policy: Policy) -> TensorFlowPrepared:
    """Hold ``policy`` against the graph; a conversion to another is taken back.

    Raises:
        UsageError: If ``policy`` names a node, an op, an input or an output that is not there.
    """
    file = _for_policy(file, policy.label)
    check_names(policy, file.graph)
    return TensorFlowPrepared(file=file, graph=file.graph)


def apply(file: TensorFlowFile, plan: Plan) -> TensorFlowApplied:
    """Replay ``plan``; ``file`` is left as it was.

    Raises:
        ModelError: If the plan was made for another model.
    """
    check_made_for(plan, file.digest, file.name)
    file = _for_policy(file, plan.policy)
    graph = file.graph
    plan.check(graph, where=file.name)
    ports = resolve_io(graph, plan.io, DTYPES, _LIBRARY.name)
    done = edits_of(graph, plan, ports)
    model = apply_edits(graph, file.binding, done)
    if done:
        model = replace(model, notes=noted(graph, plan, file.model.notes))
    return TensorFlowApplied(model=model, graph=graph, binding=file.binding, edits=done)


def roundable(
    file: TensorFlowFile, policy: str = Scope.NONE.value
) -> instrument.TensorFlowRoundable:
    """A copy of the model, as it is planned by the policy of that label, to be rounded."""
    file = _for_policy(file, policy)
    return instrument.TensorFlowRoundable(file.graph, file.binding)


def _for_policy(file: TensorFlowFile, policy: str) -> TensorFlowFile:
    """The model that a policy of that label is for: without a conversion to another one."""
    stays = file.original is None or conversion_stays(file.converted, policy)
    return file if file.original is None or stays else file.original


def input_shapes(model: FrozenModel) -> dict[str, tuple[Dim, ...] | None]:
    """Declared shapes of a model's inputs by name."""
    return {port.name: port.shape for port in model.inputs}
