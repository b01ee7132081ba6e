"""Where the evaluations of a search run: in this process, or in one that may die.

Law: an evaluation gives the same numbers wherever it runs. What kills the process of one costs
that evaluation alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finecast.data.criterion import Criterion
from finecast.data.datasets import Part
from finecast.data.metrics import Scoring
from finecast.data.workload import DataWorkload, Workload
from finecast.errors import EngineError, WrongNumbersError
from finecast.native.subject import Built, Subject
from finecast.tuning.measuring import Measuring, Racer


class LostTrialError(EngineError):
    """The process that evaluated a model died; the text says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The metric of a model on all data, and its relative output error on the timed feeds."""

    metric: float
    error: float


class Executor(ABC):
    """Evaluates a model and the models of its plans on all data.

    Attributes:
        racer: Times models on another machine; None if this one times them.
    """

    racer: Racer | None = None

    @abstractmethod
    def baseline(self, workload: Workload) -> float:
        """The metric to keep, of which ``workload`` learns what it learns of an evaluation.

        Raises:
            WrongNumbersError: If the conversion from fp64 to fp32 alone misses the criterion.
        """

    @abstractmethod
    def evaluate(self, built: Built) -> Evaluated:
        """Evaluate the model of a plan; call after the baseline was evaluated.

        Raises:
            LostTrialError: If the process that evaluates dies.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalExecutor(Executor):
    """Evaluates in this process."""

    criterion: Criterion
    measuring: Measuring

    @property
    def _subject(self) -> Subject:
        return self.measuring.subject

    def baseline(self, workload: Workload) -> float:
        """The metric of the fp64 model, where there is one, else of fp32."""
        reference, truth = self._subject.reference, self._subject.truth
        baseline = workload.evaluate(truth or reference, None)
        if truth is None:
            return baseline
        taken = workload.evaluate(reference, truth)
        if not self.criterion.passes(taken, baseline):
            raise WrongNumbersError(
                f"taken to fp32 the model misses the criterion by itself: {taken:.6g}, and"
                f" {baseline:.6g} in fp64",
                where="--from-type fp64",
                fix="it needs fp64: leave it as it is, or allow more by --tolerance",
            )
        return baseline

    def evaluate(self, built: Built) -> Evaluated:
        """Evaluate the session that the search times."""
        subject, session = self._subject, self.measuring.session(built)
        workload = self.measuring.workload
        metric = workload.evaluate(session, subject.truth or subject.reference)
        return Evaluated(metric=metric, error=self.measuring.exact().error(session))

    def baseline_part(self, part: Part) -> tuple[Scoring, Mapping[str, Any]]:
        """The fp32 model's metric of a part of the data, and what the workload learned.

        The first part comes first: by its first batch the outputs are chosen.
        """
        workload = self.measuring.workload
        assert isinstance(workload, DataWorkload)
        return workload.scoring(self._subject.reference, None, part), workload.learned()

    def evaluate_part(self, built: Built, part: Part) -> tuple[Scoring, float]:
        """The metric of a part of the data, and of the first part the output error."""
        subject, workload = self._subject, self.measuring.workload
        assert isinstance(workload, DataWorkload)  # it says how many parts it has
        session = self.measuring.session(built)
        scoring = workload.scoring(session, subject.truth or subject.reference, part)
        return scoring, 0.0 if part.index else self.measuring.exact().error(session)
