"""A model that plans are made for and that an engine loads: what differs by its library.

The verbs on such a model are written once, in ``model.py``; a library's class states how its
models are prepared, built and written.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from finecast.data.decoding import state_of
from finecast.data.sources import FeedMaker
from finecast.engines import check_runs, get_engine, reading
from finecast.engines.base import Array, Engine, Feeds, Loadable, Session
from finecast.engines.emulator.session import plan_session
from finecast.engines.fallen_apart import Kernels, try_with_kernels
from finecast.engines.loading import exact_session
from finecast.errors import UsageError
from finecast.frontends.native_model import NativeModel, with_noise, with_roundings
from finecast.frontends.prepared import AppliedModel, PreparedModel
from finecast.frontends.replaying import edits_of
from finecast.graph import Dim, Graph
from finecast.native.artefact import Destination, Verified
from finecast.native.conversion_notes import kept_types
from finecast.native.model import OpenedModel
from finecast.native.subject import Built
from finecast.numbers.formats import Format
from finecast.planning.adjustments import Adjustment
from finecast.planning.detections import JoinedOutput, joined_outputs
from finecast.planning.edits import RoundTrip, cast_count
from finecast.planning.free_rows import FreeOutput, free_outputs
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.provenance import Provenance
from finecast.rules.draws import constant_notes, random_notes
from finecast.rules.policy import Policy, Scope
from finecast.rules.quantized import quantized_notes
from finecast.terminal import one_line

AS_IT_IS = Policy(scope=Scope.NONE)
"""The policy that changes nothing."""


class ModelFile(Protocol):
    """A model as a frontend read it."""

    @property
    def model(self) -> Any:
        """The native model."""
        ...

    @property
    def path(self) -> Path:
        """Its file or folder."""
        ...

    @property
    def external(self) -> Sequence[Path]:
        """Files other than ``path`` that are read with it."""
        ...

    @property
    def name(self) -> str:
        """The name by which the file was given."""
        ...

    @property
    def digest(self) -> str:
        """Digest of all its files."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of the model where it is stored."""
        ...

    @property
    def converted(self) -> Provenance | None:
        """The conversion that made it; None if finecast did not."""
        ...

    @property
    def told(self) -> Sequence[str]:
        """Notes for the user on how it was read."""
        ...


FileT = TypeVar("FileT", bound=ModelFile)
PreparedT = TypeVar("PreparedT", bound=PreparedModel)


def check_trust(path: Path, *, trust: bool) -> None:
    """Raise UsageError for ``trust`` where no code in a model's file is ever executed."""
    if trust:
        raise UsageError(
            "--trust does not apply: no code in this file is executed",
            where=str(path),
            fix="leave it out",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOn:
    """By what a written model is verified beside the fp32 one.

    Attributes:
        engines: The first that runs both models counts; none leaves it unverified.
        feeds: Makes the inputs of both.
        data: The data on which the decisions inside both are compared.
    """

    engines: Sequence[Engine]
    feeds: FeedMaker
    data: Callable[[], Iterable[Feeds]] = tuple


@dataclass(slots=True, kw_only=True)
class EngineBuilt(Built):
    """The model of a plan, with the edits that made it."""

    applied: AppliedModel


@dataclass(slots=True, kw_only=True, repr=False)
class NativeSource(OpenedModel, Generic[FileT, PreparedT]):
    """A model of a file; the model prepared for the last policy is cached.

    The defaults are those of a library with one engine and without operation sets, whose
    models are never converted to fp32 beforehand.

    Attributes:
        file: The model as the frontend read it.
        library: What messages call models of this kind.
        engine: The name of the library's own engine.
        kind: The kind of its files, which engines say that they read.
        fp32_fix: What the user can do about ops that are not in fp32.
        builds: What keeps the model of a plan.
        told: Notes for the user on how the model was read.
    """

    library: ClassVar[str]
    engine: ClassVar[str]
    kind: ClassVar[str]
    fp32_fix: ClassVar[str]
    builds: ClassVar[type[EngineBuilt]] = EngineBuilt

    file: FileT
    told: Sequence[str] = field(default=(), init=False)
    converted: Provenance | None = field(default=None, init=False)
    _prepared: tuple[Policy, PreparedT] | None = field(default=None, init=False)
    _free: tuple[FreeOutput, ...] | None = field(default=None, init=False)
    _joined: Mapping[str, JoinedOutput] = field(
        default_factory=dict[str, JoinedOutput], init=False
    )

    def __post_init__(self) -> None:
        """The facts of the model are those of its file."""
        self.model, self.path, self.external = (
            self.file.model,
            self.file.path,
            self.file.external,
        )
        self.name, self.digest, self.told = self.file.name, self.file.digest, self.file.told
        self.converted = self.file.converted

    def __repr__(self) -> str:
        """The model's name, library and size."""
        size = f"{self.size_bytes / 1e6:.2f} MB"
        return one_line(f"<{self.library} model {self.name}, {size}>")

    @property
    def fixes_draws(self) -> bool:
        """Whether engines load the model with fixed draws in place of random ops."""
        return True

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files."""
        return self.file.size_bytes

    @property
    def loadable(self) -> Loadable:
        """What an engine loads for the fp32 model: by default the native model."""
        return self.model

    @property
    def original(self) -> Loadable | None:
        """The quantized model that this one was converted from, to compare with; else None."""
        return None

    @property
    def examples(self) -> Feeds | None:
        """Inputs that came with the model, if some did."""
        return None

    @property
    def opset(self) -> int:
        """Its operation set; 0 if its library has no such sets."""
        return 0

    @property
    @abstractmethod
    def input_shapes(self) -> Mapping[str, tuple[Dim, ...] | None]:
        """Declared shapes of the inputs that a caller gives."""

    def runners(self, spec: str | None) -> Sequence[Engine]:
        """The engine given, else all installed ones for such models, the preferred one first.

        Raises:
            UsageError: If the engine given does not run such models.
            EngineError: If no engine does.
        """
        check_runs(spec or self.engine, reading(self.kind), f"models of {self.library}")
        return [get_engine(spec or self.engine)]

    def reference(self) -> Session:
        """The model in the types that it states, used for its numbers and never timed."""
        return self.knowing_free(exact_session(self.loadable))

    def knowing_free(self, session: Session) -> Session:
        """``session`` of the fp32 model, which then knows what its graph says of outputs."""
        if self._free is None:
            before, graph = self._prepared, self.read_graph()
            self._free, self._joined = free_outputs(graph), joined_outputs(graph)
            self._prepared = before or self._prepared
        session.free, session.joined = self._free, self._joined
        return session

    def second_engine(self, engine: Engine) -> Engine | None:
        """Another engine that computes the fp32 model, to compare ``engine`` with, if any."""
        return None

    @property
    def exported(self) -> Source:
        """The model as the library of its file reads it; by default this one."""
        return self

    def truth(self) -> tuple[Session | None, tuple[str, ...]]:
        """The fp64 model that this one was converted from, if any, and notes for the user."""
        return None, tuple(self.told)

    def to_fp32(self, from_type: str) -> OpenedModel:
        """Refuse: the model has to be exported in fp32."""
        raise UsageError(
            f"--from-type {from_type} does not apply to {self.library} models",
            where=self.name,
            fix=self.fp32_fix,
        )

    def source_for(self, plan: Plan) -> NativeSource[FileT, PreparedT]:
        """The model that ``plan`` was made for: this one, or this one converted to fp32.

        Raises:
            ModelError: If the plan was made for another model.
        """
        return self

    def prepare(self, policy: Policy) -> PreparedT:
        """The model prepared for ``policy``; the last one is cached.

        Raises:
            ModelError: If ``policy`` may change it, and a conversion made it.
        """
        if policy.scope is not Scope.NONE:
            self.check_original()
        if self._prepared is None or self._prepared[0] != policy:
            self._prepared = (policy, self._prepare(policy))
        return self._prepared[1]

    def prepare_once(self, *, own: bool) -> PreparedT:
        """The model prepared without a change; not copied if it is the caller's ``own``."""
        return self.prepare(AS_IT_IS)

    def check_policy(self, policy: Policy) -> None:
        """Prepare the model, which refuses names that match nothing, and find its state."""
        state_of(self.prepare(policy).graph, policy)

    def build(self, plan: Plan) -> EngineBuilt:
        """Replay the plan on a copy of the model."""
        return self._built(plan, self._apply(plan, None))

    def consume(self, prepared: PreparedModel, plan: Plan) -> EngineBuilt:
        """As ``build``, but parts of ``prepared`` may be used in the result."""
        self._prepared = None
        return self._built(plan, self._apply(plan, prepared))

    def _built(self, plan: Plan, applied: AppliedModel) -> EngineBuilt:
        # Under a hint the engine puts in the casts; codes are in the model.
        stated = (e for e in applied.edits if not plan.by_hint or isinstance(e, RoundTrip))
        return self.builds(
            model=applied.model,
            plan=plan,
            size_bytes=self._size_of(applied.model),
            casts=cast_count(applied.graph, tuple(stated)),
            applied=applied,
        )

    def reference_name(self, graph: Graph) -> str:
        """The name of the baseline: fp32, or the model given if that was low or quantized."""
        came_low = self.converted is not None or quantized_notes(graph)
        return "the model given" if came_low else Format.FP32.label

    def notes(self, planner: Planner) -> Sequence[str]:
        """Notes on ops that keep their types, and on those that draw random numbers."""
        policy, graph = planner.policy, planner.graph
        return [
            *self.kept_notes(graph, policy),
            *quantized_notes(graph),
            *random_notes(graph, fixed=self.fixes_draws),
            *constant_notes(graph),
        ]

    def kept_notes(self, graph: Graph, policy: Policy) -> list[str]:
        """Notes on ops that keep a type other than fp32, and what to do about it."""
        return [f"{text}: {self.fp32_fix}" for text in kept_types(graph, policy).values()]

    def roundable(self, policy: str, adjustments: Sequence[Adjustment] = ()) -> NativeModel:
        """A copy, prepared for the policy of that label, to which roundings are added.

        Its operands are adjusted. A library without such copies has a ``Program`` of its own.
        """
        raise NotImplementedError(self.library)

    def rounded_session(self, plan: Plan) -> Session:
        """The numbers of a plan's model by arithmetic in fp32, in which formats overflow.

        An engine may compute ops in fp32 that a plan has in fp16, and keep their results so.
        """
        copy = self.roundable(plan.policy, plan.adjustments)
        return exact_session(with_roundings(copy, edits_of(copy.graph, plan)))

    def noisy_session(self) -> Session:
        """The fp32 model with results of ops that are off by a unit in the last place."""
        return exact_session(with_noise(self.roundable(AS_IT_IS.label)))

    def load_written(
        self, built: EngineBuilt, written: Loadable, engine: Engine
    ) -> tuple[Session, Kernels]:
        """The plan's model as it was written, in an engine, and the nodes in its kernels.

        Raises:
            EngineError: If the engine does not load it.
        """
        if engine.emulates is None:
            return try_with_kernels(engine, written)
        self.runners(None)[0].load(written)
        copy = partial(self.roundable, built.plan.policy, built.plan.adjustments)
        return plan_session(copy, built.plan, engine.emulates), ()

    @property
    def explains(self) -> bool:
        """Whether ``explained`` may run: it takes several times the model's memory."""
        return True

    def explained(
        self, built: EngineBuilt, written: Loadable, plan: Plan, feeds: Feeds
    ) -> Mapping[str, Array]:
        """The outputs that the formats of ``plan`` alone explain: by arithmetic in fp32.

        The plan is that of ``built``, which was written as ``written``, or another one.
        """
        edits = (built if plan == built.plan else self.build(plan)).applied.edits
        copy = self.roundable(built.plan.policy, built.plan.adjustments)
        return exact_session(with_roundings(copy, edits), apart=True).run(feeds)

    @abstractmethod
    def _prepare(self, policy: Policy) -> PreparedT: ...

    @abstractmethod
    def _apply(self, plan: Plan, prepared: PreparedModel | None) -> AppliedModel:
        """Replay the plan; parts of ``prepared``, if given, may be used in the result."""

    @abstractmethod
    def _size_of(self, model: Any) -> int:
        """Bytes of a native model and its tensors."""

    @abstractmethod
    def store(
        self, built: EngineBuilt, output: Destination, on: VerifyOn
    ) -> tuple[int, Verified]:
        """Write the model; returns its bytes on disk, and how it was verified.

        The model is loaded and run before it takes its name.

        Raises:
            UsageError: If the output cannot be written.
            ModelError: If the model is not valid.
            WrongNumbersError: If its formats do not explain its outputs.
            EngineError: If no engine can load it.
        """


Source: TypeAlias = NativeSource[Any, Any]
"""A model of any library."""
