"""What the verbs ask of an opened model, whatever its format."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from finecast.devices.emulation import Emulation
from finecast.engines.base import Session
from finecast.engines.fallen_apart import FallenApart
from finecast.errors import UsageError
from finecast.graph import Graph
from finecast.naming import Option, convert_options, path_of
from finecast.numbers.formats import Format
from finecast.pipeline.artefact import Destination, Verified
from finecast.pipeline.census import Census
from finecast.pipeline.device import Program
from finecast.pipeline.goal import Goal
from finecast.pipeline.low_model import LowModel
from finecast.pipeline.result import Result
from finecast.pipeline.sources import DataOptions, workload_of
from finecast.pipeline.subject import Built, SourceModel, Subject
from finecast.pipeline.workload import Workload
from finecast.planning.plan import Plan
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.rules.policy import Policy

_ENGINE: Final = Option(
    help="openvino, onnxruntime, tensorflow, torch, torch-eager; :DEVICE if not CPU; or"
    " emulator:TARGET.",
    metavar="NAME[:DEVICE]",
)
_RULES: Final = Option(
    help="Python file whose functions named rule* judge nodes; repeatable.",
    flags=("--rules",),
    metavar="FILE.py",
    kind=Path,
    many=True,
    python=(Mapping, "a dict of rule functions by name"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a model is read.

    Attributes:
        from_type: The type (fp64, fp16, bf16, int8) whose ops are taken to fp32 first; inputs
            and outputs keep theirs.
        trust: Whether code that a .pt2 or .keras file brings may be unpickled and run.
        example_inputs: Positional inputs of a PyTorch module in memory, on which it is
            captured; an exported program has its own.
        example_kwargs: Its keyword inputs.
        dynamic_shapes: Its free dimensions, as ``torch.export.export`` takes them.
    """

    from_type: str | None = Option(
        help="Take the model's ops in this type to fp32 first; inputs and outputs keep it."
        " int8: what another tool quantized, to be planned op by op.",
        metavar="fp64|fp16|bf16|int8",
    ).field(None)
    trust: bool = Option(
        help="Unpickle and run code in a .pt2 or .keras file, if you know who made the file.",
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
        own: Whether the model may be changed in place, as nobody else holds it.
        progress: Told of each step that takes long.
    """

    engine: str | None = _ENGINE.field(None)
    device: Emulation | None = None
    data: DataOptions | None = None
    dims: Mapping[str, int] = field(default_factory=dict[str, int])
    batch: int = 1
    user_rules: Mapping[str, UserRule] = _RULES.field({})
    verify: bool = Option(
        help="Write the model even if nothing here can run it.",
        flags=("--no-verify",),
        kind=bool,
    ).field(True)
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
        plan_out: Where the plan is written if the model improved; None for nowhere.
        frontier: Where the frontier is drawn (.svg) or its figures are written (.json).
        progress: Told of each step.
    """

    data: DataOptions = field(default_factory=DataOptions)
    goal: Goal = field(default_factory=Goal)
    policy: Policy = field(default_factory=Policy)
    engine: str | None = _ENGINE.field(None)
    device: Emulation | None = None
    user_rules: Mapping[str, UserRule] = _RULES.field({})
    plan_out: Path | None = Option(
        help="The plan; default OUTPUT with .plan.json: m.plan.json for m.onnx,"
        " m.pt2.plan.json for m.pt2, m.saved_model.plan.json for a folder m.",
        kind=Path,
        convert=path_of,
    ).field(None)
    study: Path | None = Option(
        help="Keep trials here; default OUTPUT with .study.db in place of its suffix. It"
        " may hold trials of several models.",
        kind=Path,
        convert=path_of,
    ).field(None)
    resume: bool = Option(help="Take up the study where it was cut off.", kind=bool).field(
        False
    )
    frontier: Path | None = Option(
        help="Draw speed against error of all plans, predicted and tried: FILE.svg, or"
        " FILE.json for the figures.",
        metavar="FILE.svg|.json",
        kind=Path,
        convert=path_of,
    ).field(None)
    progress: Progress = silent

    def __post_init__(self) -> None:
        """Read paths that were given as text.

        Raises:
            UsageError: If the frontier's file is neither a picture nor figures.
        """
        convert_options(self)
        suffix = ".svg" if self.frontier is None else self.frontier.suffix.lower()
        if suffix not in (".svg", ".json"):
            raise UsageError(
                "the frontier is drawn as .svg or written as .json",
                where=f"--frontier {self.frontier}",
                fix="give the file one of these suffixes",
            )


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

    def beside(self, low: OpenedModel, engine: str | None) -> LowModel:
        """``low``, a low version of this model, of which any ops can be returned to fp32.

        Args:
            low: The low model.
            engine: ``NAME[:DEVICE]``; None for one that computes in the types as stated.

        Raises:
            UsageError: If the two cannot be compared op by op.
        """
        del low, engine
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
        return workload_of(options, session)

    @abstractmethod
    def convert(self, output: Destination, policy: Policy, options: RunOptions) -> Result:
        """Convert by a policy and write."""

    @abstractmethod
    def apply(self, output: Destination, plan: Plan, options: RunOptions) -> Result:
        """Write the model that a plan gives."""

    def given_back(self, built: Built | None) -> Any:
        """The model of a plan in the kind that was given; for None the model itself."""
        return self.model if built is None else built.model

    @abstractmethod
    def write(
        self, outcome: Result, output: Destination, subject: Subject, workload: Workload
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
