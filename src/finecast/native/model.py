"""What the verbs ask of an opened model, and of a low version of it, whatever its format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from finecast.data.input_ranges import rows_read
from finecast.data.options import DataOptions
from finecast.data.sources import workload_of
from finecast.data.workload import Workload
from finecast.devices.emulation import Emulation, Setting, setting_of
from finecast.engines.base import Array, Feeds, Session
from finecast.engines.exact import Exact
from finecast.engines.fallen_apart import FallenApart
from finecast.errors import UsageError
from finecast.graph import Graph
from finecast.naming import Option
from finecast.native.artefact import Converted, Destination, Verified
from finecast.native.census import Census
from finecast.native.scales import WrongScale
from finecast.native.subject import Built, Subject
from finecast.numbers.formats import Format
from finecast.planning.placing import Placement
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.points import moves
from finecast.planning.provenance import Provenance
from finecast.plugin import engines
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.rules.facts import Facts, ValueFacts
from finecast.rules.policy import Policy

if TYPE_CHECKING:
    from finecast.engines.emulator.session import EmulatorSession
    from finecast.native.emulated import Program

ENGINE_OPTION: Final = Option(
    help=f"The engine that runs the model: {', '.join(entry.name for entry in engines())};"
    " :DEVICE if not CPU; or emulator:TARGET.",
    metavar="NAME[:DEVICE]",
)
RULES_OPTION: Final = Option(
    help="A Python file whose functions rule* say which formats an op may have; repeatable.",
    flags=("--rules",),
    metavar="FILE.py",
    kind=Path,
    many=True,
    python=(Mapping, "a dict of rule functions by name"),
)
Judgement: TypeAlias = "tuple[Graph, Plan, tuple[str, ...]]"
"""A graph, the lowest plan that the rules permit on it, and notes on formats that are slow."""
_NOT_EVALUATED: Final = "its accuracy was not evaluated, which tune --start does"


class OtherSizesError(UsageError):
    """An evaluation calls a module with sizes that it was not captured for.

    Attributes:
        freed: Gives the module captured anew, with those sizes free.
    """

    def __init__(
        self, what: str, *, where: str, fix: str, freed: Callable[[], OpenedModel]
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.freed = freed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a model is read.

    Attributes:
        from_type: The type (fp64, fp16, bf16, int8) whose ops are taken to fp32 first; inputs
            and outputs keep theirs.
        freeze_inputs: Whether weights that an ONNX model lists as inputs too, so that a caller
            may replace them, become constants; None: only where IR version 3 lists them all.
        trust: Whether code that a .pt2 or .keras file brings may be unpickled and run.
        example_inputs: Positional inputs of a PyTorch module in memory, on which it is
            captured; an exported program has its own.
        example_kwargs: Its keyword inputs.
        dynamic_shapes: Its free dimensions, as ``torch.export.export`` takes them.
    """

    from_type: str | None = Option(
        help="Convert ops of this type to fp32 first; inputs and outputs keep it. int8"
        " stands for ops that another tool quantized.",
        metavar="fp64|fp16|bf16|int8",
    ).field(None)
    freeze_inputs: bool | None = Option(
        help="Whether weights that are also inputs of an ONNX model become constants. Default:"
        " no, but for IR version 3, where all weights have to be inputs.",
        flags=("--freeze-inputs/--no-freeze-inputs",),
        kind=bool,
    ).field(None)
    trust: bool = Option(
        help="Run code that a .pt2 or .keras file contains. Only for files whose author you"
        " trust.",
        kind=bool,
    ).field(False)
    example_inputs: Sequence[Any] | None = Option(
        help="Positional inputs of a PyTorch module.", python=(Sequence, "a tuple of inputs")
    ).field(None)
    example_kwargs: Mapping[str, Any] | None = Option(
        help="Keyword inputs of a PyTorch module.", python=(Mapping, "a dict of inputs")
    ).field(None)
    dynamic_shapes: Any = Option(
        help="Free dimensions of a PyTorch module.", python=(object, "dynamic shapes")
    ).field(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a verb that does not tune runs and verifies a model.

    Attributes:
        engine: ``NAME[:DEVICE]``; None for the first installed one that runs the model.
        device: A device that is not here, which is emulated.
        data: Batches whose observed ranges guide the rules; the first also verifies.
        dims: Sizes of free dimensions, for random feeds.
        batch: Samples of random feeds.
        user_rules: Rule functions by name.
        verify: Whether the model has to load and run before it is written.
        lock: Whether a lock is written beside the model, with samples of ``data``.
        own: Whether the model may be changed in place, as nobody else holds it.
        progress: Told of each step that takes long.
    """

    engine: str | None = ENGINE_OPTION.field(None)
    device: Emulation | None = None
    data: DataOptions | None = None
    dims: Mapping[str, int] = field(default_factory=dict[str, int])
    batch: int = 1
    user_rules: Mapping[str, UserRule] = RULES_OPTION.field({})
    verify: bool = Option(
        help="Write the model even if no engine here can run it.",
        flags=("--no-verify",),
        kind=bool,
    ).field(True)
    lock: bool = Option(
        help="Write a deployment manifest (OUTPUT.lock.json) for finecast verify, with"
        " samples of --data.",
        kind=bool,
    ).field(False)
    own: bool = False
    progress: Progress = silent


class OpenedModel(ABC):
    """A model of one format, read, as the verbs ask for it.

    Attributes:
        model: The model in its frontend's form.
        name: The model's name in messages.
        digest: Identifies its content, in plans and studies.
        path: Its file or folder.
        external: Files other than ``path`` that are read with it.
        converted: The conversion that made it; None if finecast did not.
    """

    model: Any
    name: str
    digest: str
    path: Path
    external: Sequence[Path] = ()
    converted: Provenance | None = None

    @property
    def source(self) -> Path:
        """Its path as it was given; of an object a name, which no file has."""
        return self.path

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of the model where it is stored."""

    def check_original(self) -> None:
        """Raise ModelError for a model that a conversion made: it names its original."""
        if self.converted is not None:
            raise self.converted.refusal(self.name)

    @abstractmethod
    def check_policy(self, policy: Policy) -> None:
        """Raise UsageError if a policy does not fit the model, as by an unknown name."""

    @abstractmethod
    def build(self, plan: Plan) -> Built:
        """The model of ``plan``.

        Raises:
            ModelError: If the plan was made for another model.
        """

    def reference_name(self, graph: Graph) -> str:
        """The baseline's name: fp32, or "the model given" if that was low or quantized."""
        return Format.FP32.label

    def notes(self, planner: Planner) -> Sequence[str]:
        """Notes for the user on the model under the planner's policy, whatever is found."""
        return ()

    @abstractmethod
    def to_fp32(self, from_type: str) -> OpenedModel:
        """The model with its ops of a type (``fp64``, ``fp16``, ``bf16``, ``int8``) in fp32.

        Raises:
            UsageError: If no op has that type.
        """

    def with_inputs(self, *, frozen: bool) -> OpenedModel:
        """The model with weights that are inputs, too, as constants, or as inputs alone.

        Raises:
            UsageError: If models of its library have no such weights.
        """
        option = "--freeze-inputs" if frozen else "--no-freeze-inputs"
        raise UsageError(f"{option} is for ONNX models alone", fix="leave it out")

    def fitted(self, options: DataOptions) -> OpenedModel:
        """The model, or a form of it that takes every batch of the data."""
        return self

    @abstractmethod
    def check(self, output: Destination) -> None:
        """Raise UsageError unless the model, converted, may be written there."""

    @abstractmethod
    def reference(self) -> Session:
        """A session that computes the model as it states; used for numbers, never timed."""

    @abstractmethod
    def program(self, emulation: Emulation) -> Program:
        """The model in the form that the device's emulator runs.

        Raises:
            ModelError: If it cannot be emulated.
        """

    def beside(self, low: OpenedModel, engine: str | None) -> LowModel:
        """``low``, a low version of this model, of which any ops can be returned to fp32.

        Args:
            low: The low model.
            engine: ``NAME[:DEVICE]``; None for one that computes in the types as stated.

        Raises:
            UsageError: If the two cannot be compared op by op.
        """
        raise UsageError("models of this kind cannot be compared op by op", where=self.name)

    @abstractmethod
    def subject(self, engine: str | None, device: Emulation | None) -> Subject:
        """The model loaded in an engine, or on a device that is not here.

        Raises:
            UsageError: If it cannot be tuned there.
            EngineError: If no engine loads it.
        """

    def workload(self, options: DataOptions, session: Session) -> Workload:
        """The data that ``options`` describe, and the metric; ``session`` is the fp32 model.

        Raises:
            UsageError: If they do not fit together or do not fit the model.
        """
        if options.baseline is not None:
            raise UsageError(
                "a number is given for the fp32 model's metric, which is measured on the data",
                where="baseline",
                fix="leave it out: it is for evaluate= of a PyTorch module in memory",
            )
        return workload_of(replace(options, rows=self.rows_read), session)

    @abstractmethod
    def convert(self, output: Destination, policy: Policy, options: RunOptions) -> Converted:
        """Convert by a policy and write."""

    @abstractmethod
    def apply(self, output: Destination, plan: Plan, options: RunOptions) -> Converted:
        """Write the model that a plan gives."""

    def given_back(self, built: Built | None) -> Any:
        """The model of a plan in the kind that was given; for None the model itself."""
        return self.model if built is None else built.model

    @abstractmethod
    def write(
        self, built: Built, output: Destination, subject: Subject, workload: Workload
    ) -> tuple[int, Verified]:
        """Write the tuned model; returns its bytes on disk, and how it was verified."""

    @abstractmethod
    def census(self, options: RunOptions, low: Format) -> Census:
        """Ops by class, and with data the values that ``low`` cannot hold."""

    @abstractmethod
    def judge(self, policy: Policy, options: RunOptions) -> Judgement:
        """What the rules say of each op; beside the speeds of formats nothing is measured."""

    @abstractmethod
    def read_graph(self) -> Graph:
        """The model's graph, with the types that it states."""

    def rows_read(self) -> Mapping[str, range]:
        """The integers that inputs take, of those that read rows of a table, by name."""
        return self.read_graph().once(rows_read)

    @abstractmethod
    def placement(self, plan: Plan) -> Placement:
        """What becomes of the plan of another version of this model.

        Raises:
            UsageError: If models of this kind cannot be prepared for the plan's policy.
        """

    def placed(self, plan: Plan) -> tuple[Plan, tuple[str, ...]]:
        """``plan``, placed on this model if it was made for another version; and notes.

        Raises:
            ModelError: If few of its ops are here.
        """
        if plan.model == self.digest:
            return plan, ()
        placement = self.placement(plan)
        # Of PyTorch files plans have the graph's digest.
        if placement.plan.model == plan.model:
            return plan, ()
        placement.check(where=self.name)
        note = f"the plan is {placement.note}"
        return placement.plan, (note if placement.same else f"{note}; {_NOT_EVALUATED}",)

    @abstractmethod
    def graph_for(self, plan: Plan) -> Graph:
        """The graph whose nodes ``plan`` names.

        Raises:
            ModelError: If the plan was made for another model.
        """

    def fallen_apart(self, plan: Plan, engine: str | None) -> Sequence[FallenApart]:
        """Kernels of the fp32 model whose ops the plan lowers and then run in several kernels.

        Args:
            plan: The plan.
            engine: ``NAME[:DEVICE]``; None for the first installed one.

        Raises:
            EngineError: If the engine does not run both models.
        """
        return ()


# -------------------------------------------- a low model of which ops can be returned to fp32

Check = Callable[[str, Array, Array], bool]
"""A user's judgement of a value: its name, what the low model gives, and what fp32 gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGroup:
    """Ops that are returned to fp32 together: one that computes, and those that only move.

    Attributes:
        nodes: Their ids, the one that computes first.
        format: The low format that they have.
    """

    nodes: tuple[int, ...]
    format: Format


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a value of the low model was like on the samples.

    Attributes:
        own: Relative error of the low op, against the fp32 op on the same inputs; infinite if
            the low op gives NaN or Inf and the fp32 op does not.
        total: Relative error against the fp32 model; infinite likewise.
        spoiled: How many numbers are NaN or Inf where they are finite in fp32.
        largest: The largest magnitude that the fp32 op gives on the low model's inputs.
        refused: Whether the user's function does not accept it.
    """

    own: float
    total: float
    spoiled: int
    largest: float
    refused: bool = False


class LowModel(ABC):
    """A low model of which any groups of ops can be returned to fp32.

    Attributes:
        graph: The graph of the fp32 model.
        groups: The groups, in the order of computation.
        name: What messages call the low model.
        notes: What a user should know about how the low model was read.
        engine: ``NAME[:DEVICE]`` of the engine whose kernels compute; None if numbers are as
            the ops' definitions and the stated types give them.
    """

    graph: Graph
    groups: Sequence[OpGroup]
    name: str
    engine: str | None
    notes: Sequence[str] = ()

    @abstractmethod
    def session(self, returned: frozenset[int]) -> Session:
        """The model with the groups of these numbers in fp32, up to the next call."""

    def seen(self, feeds: Feeds, check: Check | None) -> Mapping[int, Seen]:
        """What values are like by id; empty if they cannot be seen.

        Call it before ``session``: groups that turn out to be none are left out then.
        """
        return {}

    def unexplained(self, exact: Exact, *, passed: bool) -> Sequence[str]:
        """What to say first where the groups of ops explain another error than it has."""
        return ()

    @abstractmethod
    def facts(self, feeds: Sequence[Feeds]) -> Mapping[int, ValueFacts]:
        """Facts of the fp32 model's values, by id."""

    def wrong_scales(self, facts: Callable[[], Facts]) -> Mapping[int, Sequence[WrongScale]]:
        """Scales that do not fit what the ops read, by the ids of these ops.

        Args:
            facts: Gives those of the fp32 model's values; called if there are scales at all.
        """
        return {}

    def within(self, group: int, feeds: Sequence[Feeds]) -> tuple[str, ...]:
        """Names of low ops that are returned with the op of control flow that a group is.

        They are those of its bodies that the feeds run; none where each op of a body is in a
        group of its own, and of other groups.
        """
        return ()

    @property
    def formats(self) -> dict[int, Format]:
        """Low formats by node id."""
        return {n: group.format for group in self.groups for n in group.nodes}


def grouped(graph: Graph, formats: Mapping[int, Format]) -> tuple[OpGroup, ...]:
    """Groups of the nodes in ``formats``: each that computes, with those that move its result.

    A move between two ops in fp32 would round what they hand on, so that returning these two
    alone would change nothing.
    """
    group_of: dict[int, int] = {}
    members: list[list[int]] = []
    for node in graph.nodes:
        if node.id not in formats:
            continue
        source = graph.maker(next(iter(graph.following_inputs(node)), None))
        if moves(node) and source is not None and source.id in group_of:
            group_of[node.id] = group_of[source.id]
            members[group_of[node.id]].append(node.id)
        else:
            group_of[node.id] = len(members)
            members.append([node.id])
    return tuple(OpGroup(nodes=tuple(ids), format=formats[ids[0]]) for ids in members)


@dataclass(slots=True, kw_only=True)
class EmulatedLow(LowModel):
    """A model as a device that is not here would run it."""

    program: Program
    emulation: Emulation
    name: str
    graph: Graph = field(init=False)
    groups: Sequence[OpGroup] = field(init=False)
    setting: Setting = field(init=False)
    engine: str | None = field(init=False)
    switched: EmulatorSession = field(init=False)

    def __post_init__(self) -> None:
        """Build the emulated model, whose settings are switched."""
        self.graph = self.program.graph
        self.setting = setting_of(self.graph, self.emulation)
        self.engine = f"emulator:{self.emulation.target.name}"
        cast = self.setting.reads | self.setting.writes
        self.groups = grouped(self.graph, dict.fromkeys(sorted(cast), self.emulation.format))
        self.switched = self.program.session(self.emulation, self.setting, switched=True)

    def session(self, returned: frozenset[int]) -> Session:
        """The switched session under the setting that is left."""
        left = frozenset(
            node
            for number, group in enumerate(self.groups)
            if number not in returned
            for node in group.nodes
        )
        setting = self.setting if not returned else self.setting.only(left)
        return self.switched.apply(setting)

    def facts(self, feeds: Sequence[Feeds]) -> Mapping[int, ValueFacts]:
        """Those of the emulated program in fp32."""
        return self.program.observe(feeds)
