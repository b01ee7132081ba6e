"""An ONNX model, opened, and in the form that the emulator runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from finecast.data.sources import FeedMaker
from finecast.devices.emulation import Emulation, Setting
from finecast.engines import candidates
from finecast.engines.base import Array, Engine, Feeds, Loadable, Session, feeds_for
from finecast.engines.emulator import (
    EmulatorEngine,
    EmulatorSession,
    emulated_copy,
    exact_emulator,
    exact_session,
    prepare,
)
from finecast.engines.emulator.session import plan_session
from finecast.engines.fallen_apart import Kernels, try_with_kernels
from finecast.engines.loading import exact_engine, from_memory
from finecast.errors import EngineError, ModelError, UsageError, naming
from finecast.frontends import onnx as frontend
from finecast.frontends.native_model import NativeModel
from finecast.frontends.onnx import Applied, OnnxFile, Prepared, from_model
from finecast.frontends.onnx.draws import FIXED_FROM
from finecast.frontends.onnx.opset import stated_for_engines
from finecast.frontends.onnx.source_types import stored_formats
from finecast.frontends.prepared import AppliedModel, PreparedModel
from finecast.graph import ROUNDS, Dim, Graph, Node
from finecast.native.acceptance import Pair, accept_fp32, nudged
from finecast.native.artefact import Destination, Verified, compare
from finecast.native.conversion_notes import kept_types
from finecast.native.emulated import Program
from finecast.native.engine_model import EngineModel
from finecast.native.source import AS_IT_IS, EngineBuilt, VerifyOn, check_trust
from finecast.native.subject import Built
from finecast.native.verifying import (
    Compared,
    run_both,
    staged_model,
    verify,
    with_mismatch,
)
from finecast.numbers.formats import Format
from finecast.planning.adjustments import Adjustment
from finecast.planning.plan import Plan
from finecast.rules.policy import Policy

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


def read(path: Path, *, trust: bool = False) -> OnnxModel:
    """Open the model in a file; nothing in such a file is ever executed.

    Raises:
        UsageError: If ``trust`` is given: there is nothing to trust.
    """
    check_trust(path, trust=trust)
    return OnnxModel(file=stated_for_engines(frontend.load(path)))


def take(model: Any) -> OnnxModel:
    """Open an onnx.ModelProto, an onnx_ir.Model or an ``OnnxFile``."""
    import onnx_ir as ir

    file = model if isinstance(model, OnnxFile) else from_model(model)
    return OnnxModel(file=stated_for_engines(file), as_ir=isinstance(model, ir.Model))


def _can_be_taken_out(graph: Graph, node: Node) -> bool:
    """Whether ``--from-type int8`` removes the node: it reads a constant, or a QuantizeLinear.

    What it reads of ops on codes (QLinearConv, as in QuantFormat.QOperator) has no fp32 form.
    """
    if node.op != "dequantize" or ROUNDS in node.attributes or node.inputs[0] is None:
        return False
    codes = graph.values[node.inputs[0]]
    maker = graph.maker(codes)
    return codes.constant is not None or (maker is not None and maker.op == "quantize")


# Larger models are not run by the definitions of their ops, which takes several times their
# size in memory.
_EMULATED_BYTES: Final = 1 << 30


@dataclass(slots=True, kw_only=True, repr=False)
class OnnxModel(EngineModel[OnnxFile, Prepared]):
    """An ONNX model, opened; ``as_ir`` if it was given as an onnx_ir.Model."""

    library: ClassVar[str] = "ONNX"

    as_ir: bool = False

    @property
    def source(self) -> Path:
        """Not ``path``: that of an object, or of a converted model, is a temporary file."""
        return Path(self.file.name)

    @property
    def loadable(self) -> Path:
        """The model's file."""
        return self.file.path

    @property
    def opset(self) -> int:
        """The version of ONNX's own operation set."""
        return frontend.opset_of(self.file.model)

    @property
    def fixes_draws(self) -> bool:
        """Whether its operation set can state fixed draws."""
        return self.opset >= FIXED_FROM

    @property
    def original(self) -> Path | None:
        """The quantized file that this model was converted from, if it was."""
        original = self.file.original
        return original.path if original and self.file.from_type == frontend.CODES else None

    @property
    def input_shapes(self) -> Mapping[str, tuple[Dim, ...] | None]:
        """Declared shapes of the inputs that a caller gives."""
        inputs = (v for v in self.file.model.graph.inputs if not v.is_initializer())
        return {v.name or "": _dims(v) for v in inputs}

    def runners(self, spec: str | None) -> Sequence[Engine]:
        """The engine given, else all installed ones."""
        return candidates(spec)

    def reference(self) -> Session:
        """The model by the definitions of its ops, in an engine used for numbers alone."""
        return self.knowing_free(exact_session(self.file.path))

    def second_engine(self, engine: Engine) -> Engine | None:
        """ONNX Runtime beside other engines of this machine; none for large models."""
        other = exact_engine()
        apart = engine.emulates is None and engine.name != other.name
        return other if apart and self.explains else None

    def truth(self) -> tuple[Session | None, tuple[str, ...]]:
        """The fp64 model that this one was converted from, if it runs; and notes."""
        session, note = truth_session(self.file)
        return session, (*self.told, *filter(None, [note]))

    def to_fp32(self, from_type: str) -> OnnxModel:
        """The model with its ops of that type in fp32; inputs and outputs keep their types."""
        file = frontend.take_to_fp32(self.file, from_type)
        return OnnxModel(file=file, as_ir=self.as_ir)

    def with_inputs(self, *, frozen: bool) -> OnnxModel:
        """The model with weights that are inputs, too, as constants, or as inputs alone."""
        if not any(value.is_initializer() for value in self.file.model.graph.inputs):
            option = "--freeze-inputs" if frozen else "--no-freeze-inputs"
            raise UsageError(
                f"{option}: the model has no weights that are inputs, too",
                where=self.file.name,
                fix="leave it out",
            )
        return OnnxModel(file=frontend.with_inputs(self.file, frozen=frozen), as_ir=self.as_ir)

    def source_for(self, plan: Plan) -> OnnxModel:
        """Converted to fp32 from the type that the plan names, if it names one."""
        return OnnxModel(file=frontend.planned(self.file, plan))

    def program(self, emulation: Emulation) -> Program:
        """The model with its accumulations written out as the device computes them."""
        return OnnxProgram(source=self, emulation=emulation)

    def prepare_once(self, *, own: bool) -> Prepared:
        """The model prepared without a change; not copied if it is the caller's ``own``."""
        return frontend.prepare(self.file, AS_IT_IS, own=own)

    def read_graph(self) -> Graph:
        """The graph of the model as it was read, with the ops of its local functions."""
        return frontend.prepare(frontend.inlined(self.file), AS_IT_IS).graph

    def roundable(self, policy: str, adjustments: Sequence[Adjustment] = ()) -> NativeModel:
        """A copy whose values are rounded by arithmetic."""
        prepared = self.prepare(Policy.parse(policy))
        return emulated_copy(prepared.adjusted(adjustments) if adjustments else prepared)

    def load_written(
        self, built: EngineBuilt, written: Loadable, engine: Engine
    ) -> tuple[Session, Kernels]:
        """The file in an engine; a device's emulator loads it, too.

        Where kernels of a device round values, which the file does not say, so does the
        session that is returned.
        """
        loaded = try_with_kernels(engine, written)
        rounds = any(f.dynamic_group is not None for f in built.plan.low_formats)
        if engine.emulates is None or not rounds:
            return loaded
        copy = partial(self.roundable, built.plan.policy, built.plan.adjustments)
        return plan_session(copy, built.plan, engine.emulates), ()

    @property
    def explains(self) -> bool:
        """Whether the model is so small that it is run by the definitions of its ops."""
        return self.size_bytes <= _EMULATED_BYTES

    def explained(
        self, built: EngineBuilt, written: Loadable, plan: Plan, feeds: Feeds
    ) -> Mapping[str, Array]:
        """The outputs of the plan's model by the definitions of its ops."""
        if plan == built.plan:
            return _run_exactly(written, feeds)
        return from_memory(self.build(plan).model, partial(_run_exactly, feeds=feeds))

    def _prepare(self, policy: Policy) -> Prepared:
        return frontend.prepare(self.file, policy)

    def _apply(self, plan: Plan, prepared: PreparedModel | None) -> Applied:
        assert prepared is None or isinstance(prepared, Prepared)
        return frontend.apply(self.file, plan, prepared)

    def _size_of(self, model: ir.Model) -> int:
        return frontend.size_bytes(model)

    def kept_notes(self, graph: Graph, policy: Policy) -> list[str]:
        """Notes on ops that keep a type other than fp32, and the option to convert them."""
        texts_by_label = kept_types(graph, policy)
        if any(_can_be_taken_out(graph, node) for node in graph.nodes):
            texts_by_label[frontend.CODES] = (
                "ops between QuantizeLinear and DequantizeLinear keep int8"
            )
        return [
            f"{text}: --from-type {label} (from_type={label!r}) takes them to fp32 first"
            for label, text in texts_by_label.items()
        ]

    def check(self, output: Destination) -> None:
        """Raise UsageError unless the model, converted, may be written there."""
        apart = output.external_data
        came = frontend.came_external(self.file.model)
        output.check(apart=came if apart is None else apart)

    def store(
        self, built: EngineBuilt, output: Destination, on: VerifyOn
    ) -> tuple[int, Verified]:
        """Write the model, which is checked, loaded and run before it takes its name.

        With no engines it is only checked.
        """
        self.check(output)
        with (
            staged_model(output, "model.onnx") as staged,
            naming(staged, f"{self.file.name}, converted"),
        ):
            size, notes = _saved(self.file, built.applied, staged, output)
            return size, _verify(self, built, staged, on).noted(*notes)

    def given_back(self, built: Built | None) -> onnx.ModelProto | ir.Model:
        """The model of a plan as an onnx.ModelProto, or as an onnx_ir.Model if given so."""
        import onnx_ir as ir

        proto = frontend.to_proto(EngineModel.given_back(self, built))
        return ir.from_proto(proto) if self.as_ir else proto


def _run_exactly(model: Loadable, feeds: Feeds) -> Mapping[str, Array]:
    """Outputs of a model by the definitions of its ops."""
    session = exact_session(model)
    return session.run(feeds_for(session, feeds))


@dataclass(slots=True, kw_only=True)
class OnnxProgram(Program):
    """A ``Program`` of an ONNX model; ``emulation`` tells how accumulations are computed."""

    source: OnnxModel  # pyright: ignore[reportIncompatibleVariableOverride]  # never set anew
    prepared: Prepared = field(init=False)

    def __post_init__(self) -> None:
        """Write out ops that the device computes in steps."""
        self.prepared = prepare(self.source.file, self.emulation)

    def session(
        self, emulation: Emulation, setting: Setting, *, switched: bool = False
    ) -> EmulatorSession:
        """A session built for the setting, which runs faster, or a switched one."""
        engine = EmulatorEngine(emulation=emulation)
        session = engine.session(self.prepared, fixed=None if switched else setting)
        return session.apply(setting)

    def formats(self, plan: Plan) -> dict[int, Format]:
        """The plan's formats by node id; the steps of an op are found by their names."""
        return _formats_in(self.graph, plan)

    def plan_session(self, plan: Plan, emulation: Emulation) -> EmulatorSession:
        """A session of the model with the plan's formats."""
        prepared = self.prepared
        if plan.adjustments:
            prepared = prepare(self.source.file, self.emulation, plan.adjustments)
        return plan_session(
            partial(emulated_copy, prepared),
            plan,
            emulation,
            formats=_formats_in(prepared.graph, plan),
            low=stored_formats(prepared.binding.values),
        )


def _formats_in(graph: Graph, plan: Plan) -> dict[int, Format]:
    """The plan's formats by node id; a step of an op is named ``OP/STEP``."""
    plan_formats = plan.formats
    formats = {
        n.id: plan_formats.get(n.name, plan_formats.get(n.name.rpartition("/")[0]))
        for n in graph.nodes
    }
    return {i: f for i, f in formats.items() if f is not None}


# Writing a model: checked, loaded and run before it takes its name.


def _saved(
    file: OnnxFile, applied: AppliedModel, staged: Path, output: Destination
) -> tuple[int, tuple[str, ...]]:
    """Save and check the model; returns its bytes, and what of the given one was corrected.

    Raises:
        ModelError: If the model is not valid.
    """

    def saved() -> int:
        apart = output.external_data
        with naming(staged, str(output.path or staged)):  # of what cannot be written
            size = frontend.save(applied.model, staged, force=True, external_data=apart)
        frontend.check(staged, shapeless=frontend.shapeless_ports(file.model))
        return size

    try:
        return saved(), ()
    except ModelError:
        corrected = frontend.correct_outputs(applied.model)
        if not corrected:
            raise
        return saved(), corrected


def truth_session(file: OnnxFile) -> tuple[Session | None, str]:
    """The fp64 model that ``file`` was converted from, or why that does not run here."""
    if file.truth is None:
        return None, ""
    try:
        return exact_session(file.truth.path), ""
    except EngineError as error:
        note = (
            f"the {file.from_type} model does not run here, so the error is that against it"
            f" taken to fp32: {error.what}"
        )
        return None, note


def _dims(value: ir.Value) -> tuple[Dim, ...] | None:
    if value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else d.value for d in value.shape.dims)


def _verify(source: OnnxModel, built: EngineBuilt, path: Path, on: VerifyOn) -> Verified:
    """Load and run the fp32 model and the one at ``path`` in the first engine that can."""
    try:
        return verify(source, built, path, on, _verify_in)
    except EngineError as failed:
        if why := _hard_to_run(source.file):
            pair = Pair(source=source, built=built, written=path, engine=exact_emulator())
            with suppress(EngineError):
                return _verify_in(pair, on.feeds).noted(f"{why}: {failed.where}")
        raise


def _hard_to_run(file: OnnxFile) -> str:
    """Why engines may rightly refuse a model, even in fp32; empty if there is no reason.

    Such a model is verified by the exact emulator.
    """
    shapeless = [v.name for v in file.model.graph.inputs if v.shape is None]
    if shapeless:
        return f"input {shapeless[0]!r} has no shape"
    return "inputs and outputs stay fp64" if file.from_type == "fp64" else ""


def _verify_in(pair: Pair, feeds: FeedMaker) -> Verified:
    verified, ran = run_both(pair, feeds)
    if ran is None:
        return verified
    source, graph = pair.source, pair.built.applied.graph
    if source.file.truth is not None:
        verified = _against_fp64(source.file, graph, ran, verified)
    return with_mismatch(verified, pair, ran)


def _against_fp64(file: OnnxFile, graph: Graph, ran: Compared, found: Verified) -> Verified:
    """``found`` with errors against the fp64 model, and the share that fp32 alone makes.

    Raises:
        WrongNumbersError: If the fp32 model has no right digit of an output.
    """
    session, note = truth_session(file)
    if session is None:
        return found.noted(note)
    exact = session.run(ran.feeds)
    accept_fp32(graph, ran.wanted, exact, session.run(nudged(ran.feeds)))
    beside, taken = (compare("", outputs, exact) for outputs in (ran.got, ran.wanted))
    return replace(
        found,
        max_abs_error=beside.max_abs_error,
        relative_error=beside.relative_error,
        outputs=beside.outputs,
        largest=beside.largest,
        note=beside.note,
        reference="fp64",
        taken_error=taken.relative_error,
    )
