"""What the verbs ask of an opened model, whatever its format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from finecast.data.sources import DataOptions, workload_of
from finecast.data.workload import Workload
from finecast.devices.emulation import Emulation
from finecast.engines.base import Session
from finecast.engines.fallen_apart import FallenApart
from finecast.errors import UsageError
from finecast.graph import Graph
from finecast.naming import Option
from finecast.native.artefact import Converted, Destination, Verified
from finecast.native.census import Census
from finecast.native.device import Program
from finecast.native.low_model import LowModel
from finecast.native.subject import Built, Subject
from finecast.numbers.formats import Format
from finecast.planning.placing import Placement
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.rules.policy import Policy

ENGINE_OPTION: Final = Option(
    help="openvino, onnxruntime, tensorflow, torch, torch-eager; :DEVICE if not CPU; or"
    " emulator:TARGET.",
    metavar="NAME[:DEVICE]",
)
RULES_OPTION: Final = Option(
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
        lock: Whether a lock is written beside the model, with samples of ``data``.
        partial: Whether a plan is applied although the model has few of its ops.
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
        help="Write the model even if nothing here can run it.",
        flags=("--no-verify",),
        kind=bool,
    ).field(True)
    lock: bool = Option(
        help="Write OUTPUT.lock.json for finecast verify, with samples of --data.", kind=bool
    ).field(False)
    partial: bool = Option(
        help="Apply the plan even if the model has less than half of its ops.", kind=bool
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
    """

    model: Any
    name: str
    digest: str
    path: Path
    external: Sequence[Path] = ()

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of the model where it is stored."""

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
        del graph
        return Format.FP32.label

    def notes(self, planner: Planner) -> Sequence[str]:
        """Notes for the user on the model under the planner's policy, whatever is found."""
        del planner
        return ()

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
    def judge(self, policy: Policy, options: RunOptions) -> tuple[Graph, Plan]:
        """The graph, and the lowest plan that the rules permit on it; nothing is measured."""

    @abstractmethod
    def read_graph(self) -> Graph:
        """The model's graph, with the types that it states."""

    @abstractmethod
    def placement(self, plan: Plan) -> Placement:
        """What becomes of the plan of another version of this model.

        Raises:
            UsageError: If models of this kind cannot be prepared for the plan's policy.
        """

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
