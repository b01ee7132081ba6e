"""The OpenVINO frontend: a model in, the neutral graph out; a plan in, an ``ov.Model`` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from finecast.devices.kv_cache import KV_CACHES
from finecast.errors import ModelError
from finecast.frontends.exact_casts import restated, rounded_first
from finecast.frontends.native_model import adjust
from finecast.frontends.openvino.changes import (
    hint_of,
    mark,
    marked,
    note_inserted,
    state_hint,
    state_kv_cache,
    state_rounding,
    unmark_ops,
)
from finecast.frontends.openvino.model import OvFile as OvFile
from finecast.frontends.openvino.model import from_keras as from_keras
from finecast.frontends.openvino.model import from_model as from_model
from finecast.frontends.openvino.model import guarded
from finecast.frontends.openvino.model import load as load
from finecast.frontends.openvino.model import save as save
from finecast.frontends.openvino.model import size_bytes as size_bytes
from finecast.frontends.openvino.native import (
    OvNative,
    apply_edits,
    observable,
    with_outputs,
)
from finecast.frontends.openvino.reader import port_name as port_name
from finecast.frontends.openvino.reader import read as read
from finecast.frontends.openvino.reader import shape_of
from finecast.frontends.openvino.restating import restate
from finecast.frontends.openvino.types import HINTED, STATED, TYPES
from finecast.frontends.prepared import AppliedModel, ModelLibrary, PreparedModel
from finecast.frontends.replaying import Restated, check_made_for, edits_of, resolve_io
from finecast.graph import Dim
from finecast.numbers.formats import Format
from finecast.planning.adjustments import Adjustment, edits_by
from finecast.planning.plan import Plan
from finecast.planning.provenance import Provenance
from finecast.plugin import imported_on_use
from finecast.rules.policy import Adjust, Policy
from finecast.rules.quantized import quantized_notes
from finecast.rules.user_rules import check_names

if TYPE_CHECKING:
    import openvino

    # Names of this room for others, as plugins: imported on first use.
    from finecast.frontends.openvino.model import IR_SUFFIX as IR_SUFFIX
else:
    __getattr__ = imported_on_use(__name__)


_LIBRARY: Final = ModelLibrary(name="OpenVINO", types=TYPES, states=STATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class OvPrepared(PreparedModel):
    """A model ready to be planned, and the copies of it that show and round its values."""

    file: OvFile
    model: openvino.Model
    of: ModelLibrary = _LIBRARY
    adjusts = tuple(Adjust)

    @property
    def hints(self) -> tuple[Format, ...]:
        """Formats of precision hints that a model can be made for; none if it came low."""
        low = any(n.format not in (None, Format.FP32) for n in self.graph.nodes)
        return () if low or quantized_notes(self.graph) else HINTED

    def observable(self) -> dict[str, int]:
        """Names, for ``with_outputs``, of the values that can be shown, and their ids."""
        return observable(self.graph)

    def with_outputs(self, names: Sequence[str]) -> openvino.Model:
        """A copy whose outputs are just the values called ``names``."""
        return with_outputs(self.model, names)

    def roundable(self) -> OvNative:
        """A copy whose values can be rounded."""
        return OvNative.copy_of(self.model)

    def adjusted(self, adjustments: Sequence[Adjustment]) -> OvPrepared:
        """A copy with adjusted operands, to plan by; plans are applied to the original."""
        model = _adjusted(self.model, adjustments)
        return replace(self, model=model, graph=read(model, digest=self.file.digest)[0])

    def static_shapes(self, inputs: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Shapes of observable values, as far as OpenVINO infers them from the inputs'."""
        copy = self.model.clone()
        try:
            copy.reshape({name: list(shape) for name, shape in inputs.items()})
        except RuntimeError:
            return {}
        graph, _ = read(copy)
        return graph.static_shapes(observable(graph))


@dataclass(frozen=True, slots=True, kw_only=True)
class OvApplied(AppliedModel):
    """The model that a plan gives, and the edits that made it."""

    def observable(self, *, decisions: bool = False) -> dict[str, int]:
        """Ids of such values that can be shown, by names for ``with_outputs``."""
        shown = observable(read(self.model)[0], decisions=decisions).keys()
        ids = observable(self.graph, decisions=decisions)
        return {name: index for name, index in ids.items() if name in shown}

    def with_outputs(self, names: Sequence[str]) -> openvino.Model:
        """A copy whose outputs are just the values called ``names``."""
        return with_outputs(self.model, names)


def prepare(file: OvFile, policy: Policy) -> OvPrepared:
    """Read the graph and check that it has all that ``policy`` names.

    Raises:
        UsageError: If ``policy`` names a node, an op, an input or an output that is not there.
    """
    with guarded(file.path, "the model is malformed", "convert its original again"):
        graph, _ = read(file.model, digest=file.digest)
    check_names(policy, graph)
    return OvPrepared(file=file, model=file.model, graph=graph)


def apply(file: OvFile, plan: Plan) -> OvApplied:
    """Replay ``plan`` on the model it was made for; ``file.model`` is left as it was.

    Raises:
        ModelError: If the plan was made for another model.
    """
    check_made_for(plan, file.digest, file.name, by_hint=True)
    if plan.by_hint and plan.low_floats:
        return _by_hint(file, plan)
    copy = file.model.clone()
    graph, binding = read(copy, digest=file.digest)
    plan.check(graph, where=file.name)
    if plan.adjustments:
        copy = _adjusted(copy, plan.adjustments)
        graph, binding = read(copy, digest=file.digest)
    stated: tuple[Restated, ...] = ()
    done = edits_of(graph, plan, resolve_io(graph, plan.io, TYPES, _LIBRARY.name))
    if done or plan.kv_cache is not Format.FP32:
        rounded = rounded_first(graph, done, plan)
        apply_edits(graph, binding, done, rounded)
        mark(copy, Provenance.of(plan, file.name))
        state_hint(copy, "")  # the model's own types decide, whatever was noted before
        state_rounding(copy, plan.low_formats)
        _keep_kv_cache(copy, plan, file.name)
        stated = restated(graph, rounded)
        if not plan.keep_ops:
            stated += restate(copy)
    return OvApplied(model=copy, graph=graph, edits=done, restated=stated)


def _by_hint(file: OvFile, plan: Plan) -> OvApplied:
    """The model with marks on the plan's fp32 ops, made for the hint for its low format.

    Codes are stated as in any model: the hint leaves them as they are.
    """
    low = _hinted_format(file, plan)
    copy = file.with_every_mark(_adjusted(file.model, plan.adjustments))
    graph, binding = read(copy, digest=file.digest)
    plan.check(graph, where=file.name)
    kept = {name for name, fmt in plan.formats.items() if fmt is Format.FP32}
    unmark_ops(copy, kept | marked(file.model))
    coded = edits_of(graph, plan.of_codes)
    apply_edits(graph, binding, coded)
    mark(copy, Provenance.of(plan, file.name))
    state_hint(copy, TYPES[low])
    state_rounding(copy, plan.low_formats)
    _keep_kv_cache(copy, plan, file.name, unplanned=low)
    return OvApplied(model=copy, graph=graph, edits=edits_of(graph, plan))


def _keep_kv_cache(
    model: openvino.Model, plan: Plan, where: str, *, unplanned: Format = Format.FP32
) -> None:
    """State the format of the plan's KV cache in a model that keeps a state.

    ``unplanned`` is the format where the plan has no lower one: under a hint that of the hint.

    Raises:
        ModelError: If it is a low one, and the model keeps none, or OpenVINO none in it.
    """
    kept = unplanned if plan.kv_cache is Format.FP32 else plan.kv_cache
    if model.get_sinks() and kept in KV_CACHES:
        state_kv_cache(model, kept)
    elif plan.kv_cache is not Format.FP32:
        raise ModelError(
            f"the plan keeps a KV cache in {plan.kv_cache.label}, and this model keeps none",
            where=where,
            fix="make a plan for this model",
        )


def _hinted_format(file: OvFile, plan: Plan) -> Format:
    """The format whose hint ``plan`` asks for.

    Raises:
        ModelError: If it is no plan that finecast makes: a hint has one format, and lowers
            neither inputs and outputs nor operands.
    """
    floats = plan.low_floats
    low = next((f for f in HINTED if floats == (f,)), None)
    if low is None or plan.io:
        labels = " and ".join(f.label for f in floats)
        raise ModelError(
            f"no precision hint can express the plan: it has {labels}; a hint has"
            " one format beside quantized integers, and does not change inputs and outputs",
            where=file.name,
            fix="make the plan anew with --by-hint and --auto-cast-type"
            f" {' or '.join(f.label for f in HINTED)}",
        )
    return low


def roundable(file: OvFile, adjustments: Sequence[Adjustment] = ()) -> OvNative:
    """A copy of the model, with operands adjusted, whose values can be rounded."""
    return OvNative.copy_of(_adjusted(file.model, adjustments))


def stated_in_types(file: OvFile) -> openvino.Model:
    """The model in which types alone say what is low, without a hint that it was made for."""
    if not hint_of(file.model):
        return file.model
    copy = file.model.clone()
    state_hint(copy, "")
    return copy


def input_shapes(model: openvino.Model) -> dict[str, tuple[Dim, ...] | None]:
    """Declared shapes of a model's inputs by name."""
    return {port_name(port): shape_of(port) for port in model.inputs}


def _adjusted(model: openvino.Model, adjustments: Sequence[Adjustment]) -> openvino.Model:
    """A copy of ``model`` with adjusted operands; itself where there are none."""
    if not adjustments:
        return model
    copy = model.clone()
    native = OvNative(*read(copy))
    adjust(native, edits_by(adjustments, native.graph))
    note_inserted(copy, native.inserted)
    return copy
