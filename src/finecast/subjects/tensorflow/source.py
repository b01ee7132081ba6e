"""A model of TensorFlow's that plans are made for and built of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from finecast.engines.base import Session
from finecast.errors import UsageError
from finecast.frontends import tensorflow as frontend
from finecast.frontends.tensorflow import FrozenModel, Imported, Rewritten
from finecast.frontends.tensorflow.library import DTYPES
from finecast.frontends.tensorflow.reader import functions_with_floats
from finecast.pipeline.conversion import kept_types
from finecast.planning.edits import cast_count
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.rules.matching import check_names
from finecast.rules.override import check_overrides
from finecast.rules.policy import Policy, Scope


@dataclass(slots=True, kw_only=True)
class TensorFlowBuilt:
    """The model that a plan gives; ``loaded`` once it has been run."""

    plan: Plan
    applied: Rewritten
    casts: int
    loaded: Session | None = field(default=None, repr=False)

    @property
    def model(self) -> FrozenModel:
        """The model."""
        return self.applied.model

    @property
    def size_bytes(self) -> int:
        """Bytes of the graph."""
        return self.applied.model.size_bytes

    def release(self) -> None:
        """Unload it."""
        self.loaded = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFlowSource:
    """A frozen model and its graph."""

    captured: Imported
    name: str
    size_bytes: int

    @property
    def model(self) -> FrozenModel:
        """The fp32 model."""
        return self.captured.model

    @property
    def digest(self) -> str:
        """Of the files, or of the graph where there are none."""
        return self.captured.graph.digest

    def check_policy(self, policy: Policy) -> None:
        """Refuse types of ports, formats no op computes in, names of nothing."""
        if policy.io or policy.io_low:
            raise UsageError(
                "--io does not apply to SavedModels: a signature keeps its types",
                fix="leave it out",
            )
        check_formats(policy)
        check_names(policy, self.captured.graph)
        check_overrides(self.captured.graph)

    def build(self, plan: Plan) -> TensorFlowBuilt:
        """The plan replayed."""
        applied = frontend.apply(self.captured, plan, self.name)
        casts = cast_count(self.captured.graph, applied.edits)
        return TensorFlowBuilt(plan=plan, applied=applied, casts=casts)

    def notes(self, planner: Planner) -> Sequence[str]:
        """Of an earlier conversion, and of ops that keep a type of their own."""
        return told(self.captured, planner.policy)


def check_formats(policy: Policy) -> None:
    """Raise UsageError for a format that no op of TensorFlow's computes in."""
    for fmt in (*policy.formats, *policy.op_formats.values()):
        if fmt not in DTYPES:
            raise UsageError(
                f"TensorFlow's ops do not compute in {fmt.label}", fix="use bf16 or fp16"
            )


def told(captured: Imported, policy: Policy) -> tuple[str, ...]:
    """What is to be said of a model under a policy, whatever is found."""
    if policy.scope is Scope.NONE:
        return ()
    found = [
        f"{text}: save the model in fp32 first"
        for text in kept_types(captured.graph, policy).values()
    ]
    if was := captured.model.notes.get("policy"):
        found.append(
            f"an earlier conversion to {was} stays: convert the model of before it instead"
        )
    inner = functions_with_floats(captured.model)
    if inner:
        found.append(
            f"{len(inner)} bodies of control flow or called functions keep fp32 inside:"
            f" {', '.join(inner[:3])}"
        )
    unknown = sorted({n.native for n in captured.graph.float_nodes if n.op == "unknown"})
    if unknown:
        found.append(f"ops that are not known here keep their type: {', '.join(unknown)}")
    return tuple(found)
