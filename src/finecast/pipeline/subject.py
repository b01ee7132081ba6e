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
        """What it was built by."""
        ...

    @property
    def casts(self) -> int:
        """Casts inside, those of inputs and outputs left out."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of the model where it is stored."""
        ...

    def release(self) -> None:
        """Free what was loaded to run it."""
        ...


class Examined(Protocol):
    """A subject after the rules have judged every op under one policy."""

    @property
    def planner(self) -> Planner:
        """Makes plans."""
        ...

    def analysis(self) -> Analysis:
        """Units, their times and the errors of rounding, measured or modelled.

        Raises:
            EngineError: If no plan in a low format can be run at all.
        """
        ...


class NamedModel(Protocol):
    """A model as it was read: what it is called, and what identifies it."""

    @property
    def model(self) -> Any:
        """The model in its frontend's form."""
        ...

    @property
    def name(self) -> str:
        """What messages call it."""
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
        """Raise UsageError for what of a policy does not fit the model, as unknown names."""
        ...

    def build(self, plan: Plan) -> Built:
        """The model of ``plan``.

        Raises:
            ModelError: If the plan was made for another model.
        """
        ...

    def reference_name(self, graph: Graph) -> str:
        """What the model is called: fp32, or the model given, if it came low or quantized."""
        ...

    def notes(self, planner: Planner) -> Sequence[str]:
        """What is to be told of the model under a policy, whatever is found."""
        ...


class Subject(Protocol):
    """A model, through its frontend, on what runs it here or would run it elsewhere."""

    @property
    def model(self) -> SourceModel:
        """The model."""
        ...

    @property
    def runner(self) -> str:
        """What runs plans, with all of it that touches numbers."""
        ...

    @property
    def target(self) -> str:
        """The device that is not here, of which all times are modelled; else empty."""
        ...

    @property
    def formats(self) -> tuple[Format, ...]:
        """Low formats that are tried where the user names none, in order of preference."""
        ...

    @property
    def max_steps(self) -> int:
        """Plans of the frontier that are built and timed."""
        ...

    @property
    def reference(self) -> Session:
        """The fp32 model, loaded."""
        ...

    @property
    def truth(self) -> Session | None:
        """A more exact model, whose accuracy is to be kept; else it is the fp32 model's."""
        ...

    @property
    def told(self) -> Sequence[str]:
        """What is to be told of how the model was taken, whatever is found."""
        ...

    def check_formats(self, policy: Policy) -> None:
        """Raise UsageError for a format that what runs the model has no arithmetic for."""
        ...

    def speed(self, fmt: Format) -> Speed:
        """What short probes, or the device's data sheet, say of a format."""
        ...

    def first_nan(self, workload: Workload) -> str:
        """The op that first gives NaN or Inf in fp32; empty if none is seen."""
        ...

    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> Examined:
        """Look at calibration data, and let the rules judge every op."""
        ...

    def session(self, built: Built) -> Session:
        """A fresh session.

        Raises:
            EngineError: If there are no kernels for it.
        """
        ...

    def times(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """Each model timed in turns with the fp32 model, the anchor of the race.

        Models that cannot be loaded are left out. Modelled times are stated.
        """
        ...

    def feeds(self, workload: Workload) -> Sequence[Feeds]:
        """What the error of a plan's outputs is taken on."""
        ...
