"""An ONNX subject for ``tune`` whose accuracy the user measures on the model itself.

finecast's own evaluations run a loaded session; Intel Neural Compressor's ``eval_func`` takes
the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finecast.compat.neural_compressor.onnx_result import given_form
from finecast.engines.base import Array, Feeds, KernelTime, Session
from finecast.pipeline.subject import Built
from finecast.pipeline.workload import check_finite, spread
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.subjects.engine.subject import EngineSubject

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(eq=False, kw_only=True)
class ModelSession(Session):
    """A session (``inner``) with the ``model`` that it was loaded from."""

    inner: Session
    model: ir.Model

    def __post_init__(self) -> None:
        """Inputs and outputs are those of ``inner``."""
        self.inputs, self.outputs = self.inner.inputs, self.inner.outputs

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run once."""
        return self.inner.run(feeds)

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        """Time of each kernel."""
        return self.inner.profile(feeds, repeats=repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWorkload:
    """The user's evaluation of a model, and calibration data to time it on."""

    score: Callable[[Any], float]
    feeds: Sequence[Feeds]
    higher_is_better: bool
    digest: str = ""  # no study remembers its trials
    of: tuple[str, ...] = ()
    worst: None = None
    warnings: tuple[str, ...] = ()

    def evaluate(self, session: Session, reference: Session | None) -> float:
        """The user's score of the model that was loaded."""
        assert isinstance(session, ModelSession)
        with given_form(session.model) as native:
            value = self.score(native)
        if reference is None:
            check_finite(value, "the evaluation")
        return value

    def evaluated(self) -> Sequence[Feeds]:
        """All feeds."""
        return self.feeds

    def calibration(self) -> Sequence[Feeds]:
        """All feeds."""
        return self.feeds

    def timing(self) -> Sequence[Feeds]:
        """The largest of the feeds."""
        return spread(self.feeds, 1)


@dataclass(slots=True, kw_only=True)
class EvaluatedSubject(EngineSubject):
    """A subject with sessions that are ``ModelSession``.

    It has no ``hints``: what an engine lowers by its precision hint is no model that could be
    given to ``eval_func``.
    """

    def __post_init__(self) -> None:
        """The reference is known with its model, too."""
        self.reference = ModelSession(inner=self.reference, model=self.model.model)

    def session(self, built: Built) -> ModelSession:
        """The plan's model, loaded, as a ``ModelSession``."""
        return ModelSession(inner=EngineSubject.session(self, built), model=built.model)

    def hints(self, planner: Planner) -> tuple[()]:
        """None."""
        del planner
        return ()

    def original(self, planner: Planner) -> None:
        """None: the reference is the model that was given."""
        del planner

    def by_hint(self, plan: Plan) -> None:
        """None."""
        del plan
