"""What the verbs ask of an opened model, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from finecast.devices.emulation import Emulation
from finecast.engines.base import Session
from finecast.engines.fallen_apart import FallenApart
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.artefact import Destination, Verified
from finecast.pipeline.census import Census
from finecast.pipeline.conversion import Conversion
from finecast.pipeline.goal import Goal
from finecast.pipeline.outcome import Outcome
from finecast.pipeline.program import Program
from finecast.pipeline.sources import DataOptions
from finecast.pipeline.subject import SourceModel, StoredModel, Subject
from finecast.pipeline.workload import Workload
from finecast.planning.plan import Plan
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.rules.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What runs, judges and verifies a model that is not tuned.

    Attributes:
        engine: ``NAME[:DEVICE]``; None for the first installed one that runs the model.
        device: A device that is not here.
        data: Batches whose ranges guide the rules, and the first of which verifies.
        dims: Sizes of free dimensions, for random feeds.
        batch: Samples of random feeds.
        user_rules: Rule functions by name.
        verify: Whether the model has to load and run before it is written.
        own: Whether the model may be used up: nobody else has it.
    """

    engine: str | None = None
    device: Emulation | None = None
    data: DataOptions | None = None
    dims: Mapping[str, int] = field(default_factory=dict[str, int])
    batch: int = 1
    user_rules: Mapping[str, UserRule] = field(default_factory=dict[str, UserRule])
    verify: bool = True
    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """What is tuned for, and where.

    Attributes:
        data: Data, and what accuracy is on it.
        goal: The accuracy to keep, the gain that is worth it, and what it may cost.
        policy: What may be lowered.
        engine: ``NAME[:DEVICE]``; None for the first installed one that runs the model.
        device: A device that is not here.
        user_rules: Rule functions by name.
        study: Where trials are kept.
        resume: Whether trials that are there count.
        from_type: The type whose ops are taken to fp32 first.
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
    from_type: str | None = None
    progress: Progress = silent


@runtime_checkable
class TellsKernels(Protocol):
    """A model whose kernels in an engine are known."""

    def fallen_apart(self, plan: Plan, engine: str | None) -> Sequence[FallenApart]:
        """Kernels of the fp32 model whose low ops the plan's model runs in several.

        Raises:
            EngineError: If the engine, or the first that is here, does not run both.
        """
        ...


class OpenedModel(SourceModel, StoredModel, Protocol):
    """A model of one format, read."""

    def taken(self, from_type: str) -> OpenedModel:
        """The model with its ops of a type (fp64, fp16, bf16) in fp32.

        Raises:
            UsageError: If no op has that type.
        """
        ...

    def check(self, output: Destination) -> None:
        """Raise UsageError unless the model, converted, may be written there."""
        ...

    def reference(self) -> Session:
        """The model's own numbers in fp32; no time of it counts."""
        ...

    def program(self, emulation: Emulation) -> Program:
        """The model as a device's emulation takes it.

        Raises:
            ModelError: If it cannot be emulated.
        """
        ...

    def subject(self, engine: str | None, device: Emulation | None) -> Subject:
        """The model loaded in an engine, or on a device that is not here.

        Raises:
            UsageError: If it cannot be tuned there.
            EngineError: If no engine loads it.
        """
        ...

    def convert(self, output: Destination, policy: Policy, options: RunOptions) -> Conversion:
        """Convert by a policy and write."""
        ...

    def apply(self, output: Destination, plan: Plan, options: RunOptions) -> Conversion:
        """Write what a plan gives."""
        ...

    def write(
        self, outcome: Outcome, output: Destination, subject: Subject, workload: Workload
    ) -> tuple[int, Verified]:
        """Write what tuning built; bytes on disk, and how it was verified."""
        ...

    def census(self, options: RunOptions, low: Format) -> Census:
        """Ops by class, and with data the values that ``low`` cannot hold."""
        ...

    def judge(self, policy: Policy, options: RunOptions) -> tuple[Graph, Plan]:
        """The graph, and what the rules alone say of it: the lowest plan they permit."""
        ...

    def graph_for(self, plan: Plan) -> Graph:
        """The graph whose nodes ``plan`` names.

        Raises:
            ModelError: If the plan was made for another model.
        """
        ...
