"""Candidates evaluated on all data, each once; what a study remembers is not repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from finecast.frontends.onnx import OnnxFile
from finecast.measure.criterion import Criterion
from finecast.plan import Plan
from finecast.progress import Progress
from finecast.tuner.search import Candidate
from finecast.tuner.study import Study, Trial, TrialKey
from finecast.tuner.workload import Workload


@dataclass(slots=True, kw_only=True)
class Trials:
    """The trials of one tuning. Law: each is in the study before the next starts.

    Attributes:
        file: The model.
        workload: The data.
        criterion: What is to be kept.
        baseline: The fp32 model's metric; its evaluation is counted.
        engine: What runs the plans, with all of it that touches numbers.
        measure: The metric of a plan.
        study: Where trials are kept; None for nowhere.
        progress: Told of each.
    """

    file: OnnxFile
    workload: Workload
    criterion: Criterion
    baseline: float
    engine: str
    measure: Callable[[Plan], float]
    study: Study | None
    progress: Progress
    tried: dict[str, Trial] = field(default_factory=dict[str, Trial])
    evaluations: int = 1

    def passes(self, candidate: Candidate) -> bool:
        """Evaluate one candidate, or take the stored trial."""
        key = TrialKey(
            model=self.file.digest,
            plan=candidate.plan.digest,
            engine=self.engine,
            data=self.workload.digest,
        )
        trial = self.study.find(key) if self.study else None
        if trial is None:
            metric = self.measure(candidate.plan)
            self.evaluations += 1
            trial = Trial(
                key=key,
                name=candidate.name,
                metric=metric,
                passed=self.criterion.passes(metric, self.baseline),
                latency_s=candidate.latency_s,
                plan_json=candidate.plan.to_json(),
            )
            if self.study:
                self.study.add(trial)
        # A stored trial was judged by the criterion of its time.
        passed = self.criterion.passes(trial.metric, self.baseline)
        self.tried[candidate.plan.digest] = replace(trial, passed=passed)
        self.progress("evaluation", len(self.tried), len(self.tried))
        return passed

    def metric(self, plan: Plan) -> float:
        """That of a plan that was tried."""
        return self.tried[plan.digest].metric
