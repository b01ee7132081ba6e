"""What the verbs ask of an opened model, whatever its format."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from finecast.devices.emulation import Emulation
from finecast.engines.base import Session
from finecast.engines.fallen_apart import FallenApart
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.artefact import Destination, Verified
from finecast.pipeline.census import Census
from finecast.pipeline.conversion import Conversion
from finecast.pipeline.device import Program
from finecast.pipeline.goal import Goal
from finecast.pipeline.outcome import Outcome
from finecast.pipeline.sources import DataOptions
from finecast.pipeline.subject import SourceModel, Subject
from finecast.pipeline.workload import Workload
from finecast.planning.plan import Plan
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.rules.policy import Policy


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
        own: Whether the model may be changed in place, as nobody else holds it.
        progress: Told of each step that takes long.
    """

    engine: str | None = None
    device: Emulation | None = None
    data: DataOptions | None = None
    dims: Mapping[str, int] = field(default_factory=dict[str, int])
    batch: int = 1
    user_rules: Mapping[str, UserRule] = field(default_factory=dict[str, UserRule])
    verify: bool = True
    own: bool = False
    progress: Progress = silent


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """What to tune for, and where.

    Attributes:
        data: The data, and the metric or function that tells accuracy on it.
        goal: The accuracy to keep, the gain that is worth it, and what it may cost.
        policy: What may be lowered.
        engine: ``NAME[:DEVICE]``; None for the first installed one that runs the model.
        device: A device that is not here, which is emulated.
        user_rules: Rule functions by name.
        study: The file in which trials are kept.
        resume: Whether trials in that file count.
        plan: Where the plan is written if the model improved; None for nowhere.
        from_type: The type whose ops are converted to fp32 first.
        progress: Told of each step.
    """

    data: DataOptions
    goal: Goal
    policy: Policy
    engine: str | None = None
    device: Emulation | None = None
    user_rules: Mapping[str, UserRule] = field(default_factory=dict[str, UserRule])
    study: Path | None = None
    resume: bool = False
    plan: Path | None = None
    from_type: str | None = None
    progress: Progress = silent


class OpenedModel(SourceModel):
    """A model of one format, read.

    Attributes:
        path: Its file or folder.
        external: Files other than ``path`` that are read with it.
    """

    path: Path
    external: Sequence[Path] = ()

    @abstractmethod
    def to_fp32(self, from_type: str) -> OpenedModel:
        """The model with its ops of a type (``fp64``, ``fp16``, ``bf16``, ``int8``) in fp32.

        Raises:
            UsageError: If no op has that type.
        """

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

    @abstractmethod
    def subject(self, engine: str | None, device: Emulation | None) -> Subject:
        """The model loaded in an engine, or on a device that is not here.

        Raises:
            UsageError: If it cannot be tuned there.
            EngineError: If no engine loads it.
        """

    @abstractmethod
    def convert(self, output: Destination, policy: Policy, options: RunOptions) -> Conversion:
        """Convert by a policy and write."""

    @abstractmethod
    def apply(self, output: Destination, plan: Plan, options: RunOptions) -> Conversion:
        """Write the model that a plan gives."""

    @abstractmethod
    def write(
        self, outcome: Outcome, output: Destination, subject: Subject, workload: Workload
    ) -> tuple[int, Verified]:
        """Write the tuned model; returns its bytes on disk, and how it was verified."""

    @abstractmethod
    def census(self, options: RunOptions, low: Format) -> Census:
        """Ops by class, and with data the values that ``low`` cannot hold."""

    @abstractmethod
    def judge(self, policy: Policy, options: RunOptions) -> tuple[Graph, Plan]:
        """The graph, and the lowest plan that the rules permit on it; nothing is measured."""

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
        del plan, engine
        return ()
