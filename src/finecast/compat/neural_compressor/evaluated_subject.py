"""An ONNX subject for ``tune`` whose accuracy the user measures on the model itself.

finecast's own evaluations run a loaded session; Intel Neural Compressor's ``eval_func`` takes
the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finecast.compat.neural_compressor.onnx_result import given_form
from finecast.engines.base import Array, Feeds, KernelTime, Session
from finecast.engines.probe import Speed
from finecast.measure.racing import Effort, Race
from finecast.numbers.formats import Format
from finecast.pipeline.subject import Built, Examined, UserRules
from finecast.pipeline.workload import Workload, check_finite, spread
from finecast.progress import Progress
from finecast.rules.policy import Policy
from finecast.subjects.engine.subject import EngineSubject
from finecast.subjects.onnx.source import OnnxSource

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSubject:
    """``inner`` with sessions that are ``ModelSession``.

    Unlike ``inner`` it has no ``hints``: what an engine lowers by its precision hint is no
    model that could be given to ``eval_func``.
    """

    inner: EngineSubject

    @property
    def model(self) -> OnnxSource:
        """The model."""
        assert isinstance(self.inner.model, OnnxSource)
        return self.inner.model

    @property
    def runner(self) -> str:
        """The engine."""
        return self.inner.runner

    @property
    def target(self) -> str:
        """Empty: everything is measured on this machine."""
        return self.inner.target

    @property
    def formats(self) -> tuple[Format, ...]:
        """As the engine's."""
        return self.inner.formats

    @property
    def max_steps(self) -> int:
        """As the engine's."""
        return self.inner.max_steps

    @property
    def compiles(self) -> bool:
        """As the engine's."""
        return self.inner.compiles

    @property
    def reference(self) -> ModelSession:
        """The fp32 model."""
        return ModelSession(inner=self.inner.reference, model=self.model.model)

    @property
    def truth(self) -> None:
        """None: the reference is the fp32 model itself."""
        return

    @property
    def told(self) -> Sequence[str]:
        """As the engine's."""
        return self.inner.told

    def check_formats(self, policy: Policy) -> None:
        """Raise UsageError for a format that the engine does not compute in."""
        self.inner.check_formats(policy)

    def speed(self, fmt: Format) -> Speed:
        """The speed of a format, by short probes."""
        return self.inner.speed(fmt)

    def first_nan(self, workload: Workload) -> str:
        """The first op that gives NaN, by a run that shows all values."""
        return self.inner.first_nan(workload)

    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> Examined:
        """What calibration shows of the model, and what the rules permit then."""
        return self.inner.examine(policy, user_rules, workload, progress)

    def session(self, built: Built) -> ModelSession:
        """The plan's model, loaded, as a ``ModelSession``."""
        return ModelSession(inner=self.inner.session(built), model=built.model)

    def times(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """Times of models in the engine."""
        return self.inner.times(built, workload, effort)

    def check_streams(self) -> None:
        """As the engine's."""
        self.inner.check_streams()

    def streamed(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """Times of requests in the engine, several in flight."""
        return self.inner.streamed(built, workload, effort)

    def feeds(self, workload: Workload) -> Sequence[Feeds]:
        """The feeds that models are timed on."""
        return self.inner.feeds(workload)
