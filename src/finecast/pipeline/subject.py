"""What the pipeline asks of a model, its frontend and what runs it.

A subject joins them. The pipeline knows this protocol and no frontend or engine by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from finecast.engines.base import Feeds, Session
from finecast.engines.probe import Speed
from finecast.graph import Graph
from finecast.measure.racing import Effort, Race
from finecast.numbers.formats import Format
from finecast.pipeline.workload import Workload
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis
from finecast.progress import Progress
from finecast.rules import UserRule
from finecast.rules.policy import Policy

UserRules = Sequence[tuple[str, UserRule]]


class Built(Protocol):
    """The model that a plan gives, in its frontend's form."""

    @property
    def model(self) -> Any:
        """The native model."""
        ...

    @property
    def plan(self) -> Plan:
        """The plan that it was built from."""
        ...

    @property
    def casts(self) -> int:
        """Number of casts, without those of the model's inputs and outputs."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of the model where it is stored."""
        ...

    def release(self) -> None:
        """Unload what was loaded to run it."""
        ...


class Examined(Protocol):
    """A subject whose every op the rules have judged under one policy."""

    @property
    def planner(self) -> Planner:
        """Makes plans that the rules permit."""
        ...

    def analysis(self) -> Analysis:
        """Units, their times and the errors of rounding, measured or modelled.

        Raises:
            EngineError: If no plan in a low format can be run at all.
        """
        ...


class NamedModel(Protocol):
    """A model as it was read, with its name and the digest of its content."""

    @property
    def model(self) -> Any:
        """The model in its frontend's form."""
        ...

    @property
    def name(self) -> str:
        """The model's name in messages."""
        ...

    @property
    def digest(self) -> str:
        """Identifies its content, in plans and studies."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of the model where it is stored."""
        ...


class StoredModel(NamedModel, Protocol):
    """A model of a file or folder."""

    @property
    def path(self) -> Path:
        """Its file or folder."""
        ...

    @property
    def external(self) -> Sequence[Path]:
        """Files other than ``path`` that are read with it."""
        ...


class SourceModel(NamedModel, Protocol):
    """The fp32 model that plans are made for, and that they are built of."""

    def check_policy(self, policy: Policy) -> None:
        """Raise UsageError if a policy does not fit the model, as by an unknown name."""
        ...

    def build(self, plan: Plan) -> Built:
        """The model of ``plan``.

        Raises:
            ModelError: If the plan was made for another model.
        """
        ...

    def reference_name(self, graph: Graph) -> str:
        """The baseline's name: fp32, or "the model given" if that was low or quantized."""
        ...

    def notes(self, planner: Planner) -> Sequence[str]:
        """Notes for the user on the model under the planner's policy, whatever is found."""
        ...


class Subject(Protocol):
    """A model joined with the engine that runs it here, or the emulator of another device."""

    @property
    def model(self) -> SourceModel:
        """The model."""
        ...

    @property
    def runner(self) -> str:
        """Identifies what runs plans, with every setting that changes numbers."""
        ...

    @property
    def target(self) -> str:
        """The device that is emulated, with modelled times; empty if times are measured."""
        ...

    @property
    def formats(self) -> tuple[Format, ...]:
        """Low formats that are tried if the user names none, in order of preference."""
        ...

    @property
    def max_steps(self) -> int:
        """The most plans of the frontier that are built and timed."""
        ...

    @property
    def compiles(self) -> bool:
        """Whether a plan's model is compiled to be timed, and runs without that.

        Compiling takes far longer than running: plans are then evaluated before it.
        """
        ...

    @property
    def reference(self) -> Session:
        """The fp32 model, loaded."""
        ...

    @property
    def truth(self) -> Session | None:
        """The fp64 model that the fp32 one was made from, if any: its accuracy is kept."""
        ...

    @property
    def told(self) -> Sequence[str]:
        """Notes for the user on how the model was read and run, whatever tuning finds."""
        ...

    def check_formats(self, policy: Policy) -> None:
        """Raise UsageError for a format that the engine or device does not compute in."""
        ...

    def speed(self, fmt: Format) -> Speed:
        """Whether a format is faster than fp32, by short probes or the device's data sheet."""
        ...

    def first_nan(self, workload: Workload) -> str:
        """The op that first gives NaN or Inf in fp32; empty if none is seen."""
        ...

    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> Examined:
        """Observe values on calibration data, and let the rules judge every op."""
        ...

    def session(self, built: Built) -> Session:
        """A session of a plan's model.

        Raises:
            EngineError: If the engine has no kernels for it.
        """
        ...

    def times(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """Each model timed in turns with the fp32 model, the anchor of the race.

        Models that cannot be loaded are left out. Modelled times are given without a spread.
        """
        ...

    def feeds(self, workload: Workload) -> Sequence[Feeds]:
        """The inputs on which the output error of a plan is measured."""
        ...
