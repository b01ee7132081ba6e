"""The TensorFlow frontend: reads graphs without variables, and applies plans to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from finecast import Plan, Policy
from finecast.frontends import (
    AppliedModel,
    ModelLibrary,
    PreparedModel,
    adjust,
    check_made_for,
    edits_of,
    replay,
    resolve_io,
)
from finecast.graph import Dim, Graph
from finecast.planning import Adjustment, Provenance, edits_by
from finecast.rules import Adjust, check_names
from finecast_tensorflow.frontend.library import DTYPES
from finecast_tensorflow.frontend.model import FrozenModel, with_sizes
from finecast_tensorflow.frontend.native import TensorFlowNative, observable, with_outputs
from finecast_tensorflow.frontend.reader import GraphBinding, read


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFlowFile:
    """A model as it was read, with its neutral graph; neither is ever changed.

    Attributes:
        path: Its file or folder; for a model in memory a name that no file has.
        name: What messages call it.
        model: The model.
        graph: Its neutral graph.
        binding: What the ids of the graph stand for.
        external: Its files other than ``path``; always empty.
        told: What to tell the user about reading it; always empty.
    """

    path: Path
    name: str
    model: FrozenModel
    graph: Graph = field(repr=False)
    binding: GraphBinding = field(repr=False)
    external: tuple[Path, ...] = ()
    told: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights and the graph, the form in which conversions are written.

        The model's own files would not compare: Keras's hold all variables twice, a SavedModel
        every function of the layers.
        """
        return self.model.size_bytes

    @property
    def digest(self) -> str:
        """The digest of all its files, or of the graph where there are none."""
        return self.graph.digest

    @property
    def converted(self) -> Provenance | None:
        """The conversion that made it; None if finecast did not."""
        return Provenance.read(self.model.notes)


_LIBRARY: Final = ModelLibrary(name="TensorFlow", types=DTYPES, states=DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFlowPrepared(PreparedModel):
    """A model ready to be planned, and the copies of it that show and round its values."""

    file: TensorFlowFile
    of: ModelLibrary = _LIBRARY
    adjusts = (Adjust.RANGE,)

    def observable(self) -> dict[str, int]:
        """Names, for ``with_outputs``, of the values that can be shown, and their ids."""
        return observable(self.graph, self.file.binding)

    def with_outputs(self, names: Sequence[str]) -> FrozenModel:
        """A copy whose outputs are just the values called ``names``."""
        return with_outputs(self.file.model, names)

    def roundable(self) -> TensorFlowNative:
        """A copy whose values can be rounded."""
        return TensorFlowNative(self.graph, self.file.binding)

    def adjusted(self, adjustments: Sequence[Adjustment]) -> TensorFlowPrepared:
        """A copy with adjusted operands, to plan by; plans are applied to the original."""
        file = _adjusted(self.file, adjustments)
        return replace(self, file=file, graph=file.graph)

    def static_shapes(self, inputs: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Shapes of observable values, as far as TensorFlow infers them from the inputs'."""
        graph, binding = read(with_sizes(self.file.model, inputs))
        return graph.static_shapes(observable(graph, binding))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFlowApplied(AppliedModel):
    """The model that a plan gives, and the edits that made it."""

    binding: GraphBinding

    def observable(self, *, decisions: bool = False) -> dict[str, int]:
        """Ids of such values that can be shown, by names for ``with_outputs``."""
        kept = {node.name for node in self.model.graph.node}
        shown = observable(self.graph, self.binding, decisions=decisions)
        return {name: i for name, i in shown.items() if name.partition(":")[0] in kept}

    def with_outputs(self, names: Sequence[str]) -> FrozenModel:
        """A copy whose outputs are just the values called ``names``."""
        return with_outputs(self.model, names)


def capture(model: FrozenModel, digest: str, *, path: Path = Path("model")) -> TensorFlowFile:
    """The model with its graph; ``digest`` identifies it in plans."""
    graph, binding = read(model, digest)
    return TensorFlowFile(
        path=path,
        name=str(path),
        model=model,
        graph=graph,
        binding=binding,
    )


def prepare(file: TensorFlowFile, policy: Policy) -> TensorFlowPrepared:
    """Check that the graph has all that ``policy`` names.

    Raises:
        UsageError: If ``policy`` names a node, an op, an input or an output that is not there.
    """
    check_names(policy, file.graph)
    return TensorFlowPrepared(file=file, graph=file.graph)


def apply(file: TensorFlowFile, plan: Plan) -> TensorFlowApplied:
    """Replay ``plan``; ``file`` is left as it was.

    Raises:
        ModelError: If the plan was made for another model.
    """
    check_made_for(plan, file.digest, file.name)
    plan.check(file.graph, where=file.name)
    file = _adjusted(file, plan.adjustments)
    graph = file.graph
    ports = resolve_io(graph, plan.io, DTYPES, _LIBRARY.name)
    done = edits_of(graph, plan, ports)
    native = TensorFlowNative(graph, file.binding)
    replay(native, done)
    model = native.finish()
    if done:
        model = replace(model, notes=Provenance.of(plan, file.name).notes)
    return TensorFlowApplied(model=model, graph=graph, binding=file.binding, edits=done)


def roundable(
    file: TensorFlowFile, adjustments: Sequence[Adjustment] = ()
) -> TensorFlowNative:
    """A copy, with operands adjusted, whose values can be rounded."""
    file = _adjusted(file, adjustments)
    return TensorFlowNative(file.graph, file.binding)


def _adjusted(file: TensorFlowFile, adjustments: Sequence[Adjustment]) -> TensorFlowFile:
    """The model with adjusted operands, read anew; itself where there are none."""
    if not adjustments:
        return file
    native = TensorFlowNative(file.graph, file.binding)
    adjust(native, edits_by(adjustments, file.graph))
    model = native.finish()
    graph, binding = read(model, file.digest)
    return replace(file, model=model, graph=graph, binding=binding)


def input_shapes(model: FrozenModel) -> dict[str, tuple[Dim, ...] | None]:
    """Declared shapes of a model's inputs by name."""
    return {port.name: port.shape for port in model.inputs}
