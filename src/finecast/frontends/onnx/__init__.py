"""The ONNX frontend: reads a model file as the neutral graph, and makes a plan's model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import onnx
import onnx_ir as ir

from finecast import ops
from finecast.errors import FinecastError, ModelError, first_line
from finecast.frontends.collection import paused_collection
from finecast.frontends.exact_casts import StoredAs, restated, rounded_first
from finecast.frontends.joining import ModelPair
from finecast.frontends.native_model import adjust
from finecast.frontends.onnx.coded_products import is_coded, restore_products
from finecast.frontends.onnx.constants import DATA_TYPES
from finecast.frontends.onnx.definitions import opset_of as opset_of
from finecast.frontends.onnx.definitions import signature
from finecast.frontends.onnx.editor import name_nodes
from finecast.frontends.onnx.functions import inline_functions
from finecast.frontends.onnx.model import NOTES
from finecast.frontends.onnx.model import OnnxFile as OnnxFile
from finecast.frontends.onnx.model import came_external as came_external
from finecast.frontends.onnx.model import fits_one_message as fits_one_message
from finecast.frontends.onnx.model import from_model as from_model
from finecast.frontends.onnx.model import load as load
from finecast.frontends.onnx.model import save as save
from finecast.frontends.onnx.model import to_bytes as to_bytes
from finecast.frontends.onnx.model import with_inputs as with_inputs
from finecast.frontends.onnx.native import PassDiedError
from finecast.frontends.onnx.opset import (
    PROBED_FROM,
    needed_opsets,
    probed,
    raise_as_far,
    raise_opset,
)
from finecast.frontends.onnx.qlinear import opset_to_write_out, write_out_codes
from finecast.frontends.onnx.reader import OnnxBinding, read
from finecast.frontends.onnx.restating import restate
from finecast.frontends.onnx.source_types import CODES as CODES
from finecast.frontends.onnx.source_types import SOURCE_TYPES as SOURCE_TYPES
from finecast.frontends.onnx.source_types import stored_formats, widen
from finecast.frontends.onnx.source_types import take_to_fp32 as take_to_fp32
from finecast.frontends.onnx.statements import STATEMENTS, stated_since
from finecast.frontends.onnx.stream import size_bytes as size_bytes
from finecast.frontends.onnx.stream import to_proto as to_proto
from finecast.frontends.onnx.types import (
    check_inferable,
    forget_free_sizes,
    infer,
    static_shapes,
)
from finecast.frontends.onnx.types import correct_outputs as correct_outputs
from finecast.frontends.onnx.types import types_computed_in as types_computed_in
from finecast.frontends.onnx.verify import check as check
from finecast.frontends.onnx.verify import shapeless_ports as shapeless_ports
from finecast.frontends.onnx.writer import EditedModel, apply_edits
from finecast.frontends.prepared import AppliedModel, ModelLibrary, PreparedModel
from finecast.frontends.replaying import Restated, check_made_for, edits_of
from finecast.graph import PHI, Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.planning.adjustments import Adjustment, edits_by
from finecast.planning.edits import Edit
from finecast.planning.plan import Decision, Plan
from finecast.planning.provenance import Provenance
from finecast.plugin import imported_on_use
from finecast.rules.base import DECIDED_BY, DECISION
from finecast.rules.policy import Adjust, Policy, Scope
from finecast.rules.user_rules import check_names

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.frontends.onnx.model import Stage as Stage
else:
    __getattr__ = imported_on_use(__name__)


_DECISIONS: Final = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
_LIBRARY: Final = ModelLibrary(name="ONNX", types=DATA_TYPES, states=STATEMENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(PreparedModel):
    """A model ready to be planned.

    Its nodes are named, its types inferred, and its opset has what the policy may need.
    """

    file: OnnxFile
    model: ir.Model
    binding: OnnxBinding
    own_nodes: frozenset[str] = frozenset()
    """Names of the nodes before the opset was raised."""
    policy: str = ""
    """Label of the policy that it was prepared for."""
    shaped: tuple[ir.Value, ...] = ()
    """Values whose shape was inferred, not stated: a converted model does not state it."""
    of: ModelLibrary = _LIBRARY
    adjusts = tuple(Adjust)

    @property
    def from_type(self) -> str:
        """The type whose ops were converted to fp32 before; empty if none."""
        return self.file.from_type

    @property
    def frozen(self) -> bool | None:
        """Whether the user had weights that are inputs, too, made constants, or kept."""
        return self.file.frozen

    def minimal_opset(self, formats: Mapping[int, Format]) -> int:
        """The file's own opset where it admits the chosen formats, else that of ``model``.

        Raising the opset may rewrite ops. A plan that chooses a format for an op that this
        made needs the raised opset again.
        """
        own, raised = opset_of(self.file.model), opset_of(self.model)
        if own == raised:
            return own
        for node in self.graph.nodes:
            fmt = formats.get(node.id, Format.FP32)
            if node.format is not None and node.op != PHI and node.name not in self.own_nodes:
                return raised
            if fmt is node.format or fmt is Format.FP32:
                continue
            if self._since(node, fmt, own, raised) > own:
                return raised
        return own

    def _since(self, node: Node, fmt: Format, own: int, raised: int) -> int:
        """The first opset, from ``own`` up, where the op and casts beside it take ``fmt``."""
        stated = stated_since(fmt, own)
        if not fmt.encodes_results:
            return stated
        native = self.binding.nodes[node.id] or self.binding.owners[node.id]
        op_signature = signature(native.op_type, native.domain, own)
        return max(
            op_signature.since.get(fmt.storage, raised) if op_signature else raised, stated
        )

    def can_cast(self, fmt: Format) -> bool:
        """Whether the opset that the model was raised to has nodes that round to ``fmt``."""
        opset = opset_of(self.model)
        return stated_since(fmt, opset) == opset

    def observable(self) -> dict[str, int]:
        """Ids, by name, of the float values that can be outputs: those outside of bodies."""
        return self._outside_of_bodies(lambda value: value.format is not None)

    def countable(self) -> dict[str, int]:
        """As ``observable``, with values of integers and bools."""
        counted = ("int", "uint", "bool")
        return self._outside_of_bodies(
            lambda value: value.format is not None or value.dtype.startswith(counted)
        )

    def _outside_of_bodies(self, shown: Callable[[Value], bool]) -> dict[str, int]:
        names: dict[str, int] = {}
        for value in self.graph.values:
            native = self.binding.values[value.id]
            producer = native.producer()
            outside = producer is not None and producer.graph is self.binding.model.graph
            if outside and native.name and value.constant is None and shown(value):
                names[native.name] = value.id
        return names

    def with_outputs(self, names: Sequence[str]) -> ir.Model:
        """A copy whose outputs are just the values called ``names``."""
        return with_outputs(self.model, names)

    def pair(self, low: PreparedModel, *, by_types: bool) -> ModelPair:
        """Copies of both at the later of their operation sets, without local functions."""
        assert isinstance(low, Prepared)
        models = self.model, low.model
        opset = max(*map(opset_of, models), *map(opset_to_write_out, models), PROBED_FROM)

        def copied(one: Prepared) -> ir.Model:
            model = raise_opset(inline_functions(one.model.clone()), opset)
            write_out_codes(model)
            name_nodes(model)
            infer(model, shapes=True)
            if one is low:
                forget_free_sizes(model)
            return model

        exact = EditedModel(*read(copied(self)), emulates=by_types)
        if not by_types:
            return ModelPair.of(exact, EditedModel(*read(copied(low))))
        other = EditedModel(*read(widen(copied(low))))
        stored = stored_formats(other.binding.values)
        return ModelPair(exact=exact, low=other, stored=stored, rounds=True)

    def roundable(self) -> EditedModel:
        """A copy in fp32 whose values can be rounded."""
        return EditedModel(*read(widen(self.model).clone()))

    def static_shapes(self, inputs: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Shapes of values outside of bodies, by name, where onnx's inference knows them."""
        return static_shapes(self.model, inputs)

    def adjusted(self, adjustments: Sequence[Adjustment]) -> Prepared:
        """A copy with adjusted operands, to observe; plans are still made for this model."""
        model = self.model.clone()
        graph, binding = read(model, digest=self.file.digest)
        adjust(EditedModel(graph, binding), edits_by(adjustments, graph))
        graph, binding = read(model, digest=self.file.digest)
        return replace(self, model=model, graph=graph, binding=binding, policy="", shaped=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied(AppliedModel):
    """The model that a plan gives, and the edits that made it."""

    def observable(self, *, decisions: bool = False) -> dict[str, int]:
        """Ids, by name, of the values of such types that are computed outside of bodies."""
        kinds = set(_DECISIONS if decisions else DATA_TYPES.values())
        values = (v for node in self.model.graph for v in node.outputs)
        shown = {v.name for v in values if v.name and v.dtype in kinds}
        made = (v for v in self.graph.values if v.producer is not None)
        return {v.name: v.id for v in made if v.name in shown}

    def with_outputs(self, names: Sequence[str]) -> ir.Model:
        """A copy whose outputs are just the values called ``names``."""
        return with_outputs(self.model, names)


def prepare(file: OnnxFile, policy: Policy, *, own: bool = False) -> Prepared:
    """Name the nodes, raise the opset as far as ``policy`` can need, infer types.

    Local functions are inlined.

    Args:
        file: The model.
        policy: What may be low.
        own: Whether ``file.model`` may be changed; else a copy is.

    Raises:
        UsageError: If ``policy`` names a node, an op, an input or an output that is not there.
        ModelError: If the model is malformed in a way that ``load`` does not find.
    """
    with _guarded(file), paused_collection():
        model = _opened(file, policy.label, own=own)
        names = frozenset(n.name or "" for n in model.graph.all_nodes())
        if policy.scope is not Scope.NONE or policy.op_formats:
            candidates = _candidates(policy)
            needed = (needed_opsets(model, fmt, candidates) for fmt in policy.formats)
            model = probed(raise_as_far(model, frozenset[int]().union(*needed)))
        prepared = _read(file, model, shapes=True)
        check_names(policy, prepared.graph)
        return replace(prepared, own_nodes=names, policy=policy.label)


def inlined(file: OnnxFile) -> OnnxFile:
    """The model with its local functions inlined, as plans that lower ops see it."""
    if not file.model.functions:
        return file
    with _guarded(file), paused_collection():
        model = file.model.clone()
        name_nodes(model)
        return replace(file, model=inline_functions(model), message=None)


def _opened(file: OnnxFile, policy: str, *, own: bool = False) -> ir.Model:
    """The model, a copy unless it is the caller's ``own``, with unique names of nodes.

    Local functions are inlined. What is known to crash onnx's passes is refused here and not
    checked again: later edits add nothing of it.
    """
    model = file.model if own else file.model.clone()
    name_nodes(model)
    restore_products(model)
    if policy.partition(":")[0] != Scope.NONE.value:
        model = inline_functions(model)
    check_inferable(model)
    return model


@contextmanager
def _guarded(file: OnnxFile) -> Generator[None]:
    """Turns whatever Python raises on a malformed model into one clear error."""
    try:
        yield
    except PassDiedError as error:
        raise PassDiedError(error.what, where=file.name, fix=error.fix) from error
    except FinecastError:
        raise
    except Exception as error:
        raise ModelError(
            f"the model is malformed: {type(error).__name__}: {first_line(error)}",
            where=file.name,
            fix="run onnx.checker on it, and export it again",
        ) from error


def _read(file: OnnxFile, model: ir.Model, *, shapes: bool) -> Prepared:
    name_nodes(model)
    shaped = infer(model, shapes=shapes, message=_message_of(file, model))
    graph, binding = read(model, digest=file.digest, came_as=file.came_as)
    return Prepared(file=file, model=model, graph=graph, binding=binding, shaped=shaped)


def _message_of(file: OnnxFile, model: ir.Model) -> onnx.ModelProto | None:
    """The message that the file was parsed to, if ``model`` still has its values and ops."""
    changed = file.model.functions or file.converted
    return None if changed or opset_of(model) != opset_of(file.model) else file.message


def _candidates(policy: Policy) -> frozenset[str] | None:
    """ONNX op types that ``policy`` may lower; None for all."""
    if policy.scope is not Scope.MATMULT or policy.op_formats:
        return None
    names = (n for info in ops.OP_TABLE if info.matmul_engine for n in info.onnx)
    return frozenset(n.rpartition("::")[2] for n in names)


def apply(file: OnnxFile, plan: Plan, prepared: Prepared | None = None) -> Applied:
    """Replay ``plan`` on the model it was made for; ``file.model`` is left as it was.

    Args:
        file: The model.
        plan: The plan.
        prepared: What the plan was made with, if nothing else needs it any more. It saves
            the time to prepare the model again: its own model is changed and becomes the
            result, if it has the plan's opset. The result is the same without.

    Raises:
        ModelError: If the plan was made for another model.
    """
    file = planned(file, plan)
    with _guarded(file), paused_collection():
        if prepared is None or not _fits(prepared, file, plan):
            model = raise_opset(_opened(file, plan.policy), plan.opset)
            prepared = _read(file, model, shapes=False)
        for value in prepared.shaped:
            value.shape = None
        prepared, done, rounded = _replay(prepared, plan)
        _note_types(prepared.graph, prepared.binding, plan)
        model, stated = prepared.model, tuple[Restated, ...]()
        if not plan.keep_ops and (done or any(map(is_coded, model.graph.all_nodes()))):
            model, stated = restate(model, plan.engine)
        stated = (*stated, *restated(prepared.graph, rounded))
    if done:
        notes = Provenance.of(plan, file.name).notes
        model.metadata_props.update({f"{NOTES}{key}": text for key, text in notes.items()})
    return Applied(model=model, graph=prepared.graph, edits=done, restated=stated)


def planned(file: OnnxFile, plan: Plan) -> OnnxFile:
    """``file``, converted to fp32 if ``plan`` was made for it so converted.

    Raises:
        ModelError: If the plan was made for another model.
    """
    check_made_for(plan, file.digest, file.name, opsets=True)
    if plan.frozen is not None:
        file = with_inputs(file, frozen=plan.frozen)
    if plan.from_type and not file.from_type:
        return take_to_fp32(file, plan.from_type)
    if plan.from_type != file.from_type:
        raise ModelError(
            f"the plan is of the model as it is, and this one was taken from {file.from_type}",
            where=file.name,
            fix="give the plan the model that it was made for",
        )
    return file


def _fits(prepared: Prepared, file: OnnxFile, plan: Plan) -> bool:
    """Whether preparing ``file`` for ``plan`` would give ``prepared`` again."""
    same = prepared.file is file and prepared.policy == plan.policy
    return same and opset_of(prepared.model) == plan.opset


def _replay(
    prepared: Prepared, plan: Plan
) -> tuple[Prepared, tuple[Edit, ...], Mapping[int, StoredAs]]:
    """Adjust operands and make the edits of ``plan`` in ``prepared.model``.

    Returns:
        What the edits were made in, its operands adjusted; the edits; and the values
        that are rounded before they are cast, by id.
    """
    plan.check(prepared.graph, where=prepared.file.name)
    edits = plan.adjusting(prepared.graph, where=prepared.file.name)
    adjust(EditedModel(prepared.graph, prepared.binding), edits)
    if plan.adjustments:
        graph, binding = read(prepared.model, digest=prepared.file.digest)
        prepared = replace(prepared, graph=graph, binding=binding)
    done = edits_of(prepared.graph, plan, prepared.resolve_io(plan.io))
    rounded = rounded_first(prepared.graph, done, plan)
    apply_edits(prepared.graph, prepared.binding, done, rounded)
    return prepared, done, rounded


# ------------------------------------------------------------ notes on nodes that viewers show
#
# Netron and others list a node's ``metadata_props``. Only ops that a search lowered have such
# a note: of others a policy or a rule says all there is to say. It has no measured figure, and
# no reason that compares such figures: one plan gives the same file on any day.

TYPE_KEY: Final = "finecast.type"


def _note_types(graph: Graph, binding: OnnxBinding, plan: Plan) -> None:
    """Note on each node the low type that a search chose."""
    chosen = {d.node: d.format for d in plan.decisions if _is_chosen_low(d)}
    for node in graph.float_nodes:
        native = binding.nodes[node.id]
        if native is not None and node.name in chosen:
            native.metadata_props[TYPE_KEY] = chosen[node.name].label


def _is_chosen_low(decision: Decision) -> bool:
    """Whether costs, not a policy or a rule, chose a format other than fp32."""
    return decision.format is not Format.FP32 and any(
        r.rule == DECISION and DECIDED_BY in r.evidence for r in decision.reasons
    )


# ---------------------------------------------------- copies of a model that output its values


def with_outputs(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """A copy of ``model`` whose outputs are just the values called ``names``."""
    copy = model.clone()
    by_name = {v.name: v for node in copy.graph for v in node.outputs}
    copy.graph.outputs.clear()
    copy.graph.outputs.extend(by_name[name] for name in names)
    return copy
