"""``tune`` for a device that is not here: accuracy by its emulator, time by its roofline.

Laws: what it returns passes the criterion in emulation on all data and is faster than fp32
by the model; nothing of it was measured on the device.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from finecast.emulation import Emulation
from finecast.engines.base import Session
from finecast.errors import UsageError
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import OnnxFile
from finecast.frontends.onnx.emulation import Setting
from finecast.measure.criterion import Criterion
from finecast.ops import OpKind
from finecast.plan import Plan
from finecast.policy import Policy
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.tuner.conversion import kept_notes
from finecast.tuner.device import DeviceModel, PlanSearch, search_plans
from finecast.tuner.search import Candidate, chain
from finecast.tuner.study import Study
from finecast.tuner.trials import Trials
from finecast.tuner.tuning import Measured, Outcome, Verdict
from finecast.tuner.workload import Workload


def tune_for(
    file: OnnxFile,
    workload: Workload,
    criterion: Criterion,
    policy: Policy,
    emulation: Emulation,
    user_rules: tuple[tuple[str, UserRule], ...] = (),
    *,
    truth: Session | None = None,
    study: Study | None = None,
    progress: Progress = silent,
) -> Outcome:
    """The fastest plan by op that keeps ``criterion`` on the emulated device.

    ``truth`` is the model whose accuracy is to be kept, where it is not the fp32 model's.

    Raises:
        UsageError: If the device lacks the policy's format.
        ModelError: If the fp32 model gives NaN, or cannot be converted.
    """
    start = time.perf_counter()
    target = emulation.target
    for low in policy.formats:
        if target.engine_for(OpKind.MATMUL).computes_in(low) is None:
            have = target.engine_for(OpKind.MATMUL).rates_tflops
            raise UsageError(
                f"{target.name} has no {low.label} arithmetic",
                where="--auto-cast-type",
                fix=f"use one of {', '.join(f.label for f in have)}",
            )
    prepared = frontend.prepare(file, policy)  # a slip in a name shows here
    low_emulation = replace(emulation, format=policy.format)
    device = DeviceModel(
        file=file,
        workload=workload,
        criterion=criterion,
        emulation=low_emulation,
        truth=truth,
        progress=progress,
    )
    search = search_plans(device, low_emulation, policy, user_rules, prepared)
    trials = Trials(
        file=file,
        workload=workload,
        criterion=criterion,
        baseline=device.baseline,
        engine=_engine_key(low_emulation),
        measure=lambda plan: search.evaluate(plan)[0],
        study=study,
        progress=progress,
    )
    outcome = _Tuning(search=search, trials=trials).outcome()
    kept = tuple(kept_notes(prepared.graph, policy))
    seconds = time.perf_counter() - start
    return replace(outcome, target=target.name, seconds=seconds, warnings=kept)


@dataclass(slots=True, kw_only=True)
class _Tuning:
    search: PlanSearch
    trials: Trials

    def outcome(self) -> Outcome:
        """Try the chain's candidates; the ends in numbers."""
        search, device = self.search, self.search.device
        base = Measured(
            metric=device.baseline,
            latency_s=device.time_s(search.emulation, Setting()),
            size_bytes=device.file.size_bytes,
        )
        candidates = [c for c in search.candidates() if c.plan.lowers]
        chained = chain(candidates, base.latency_s)
        found = self.trials.search(chained)
        if found is not None:
            return self._improved(found, base)
        if not candidates:
            why = "the rules leave no op a lower format"
        elif not chained:
            fastest = min(c.latency_s for c in candidates)
            why = f"no plan is faster by the model: {_ms(fastest)}, fp32 {_ms(base.latency_s)}"
        else:
            why = self.trials.none_passes(len(candidates))
        return self._of(Verdict.UNCHANGED, why, search.planner.unchanged(why), base, base)

    def _improved(self, found: Candidate, base: Measured) -> Outcome:
        model = frontend.apply(self.search.device.file, found.plan).model
        tuned = Measured(
            metric=self.trials.metric(found.plan),
            latency_s=found.latency_s,
            size_bytes=frontend.size_bytes(model),
        )
        why = f"{found.name} keeps the criterion in emulation"
        return replace(
            self._of(Verdict.IMPROVED, why, found.plan, base, tuned),
            casts=found.casts,
            predicted_error=math.sqrt(found.error),
            measured_error=self.search.error(found.plan),
        )

    def _of(
        self, verdict: Verdict, why: str, plan: Plan, base: Measured, tuned: Measured
    ) -> Outcome:
        return Outcome(
            verdict=verdict,
            why=why,
            baseline=base,
            tuned=tuned,
            speedup=base.latency_s / tuned.latency_s,
            speedup_spread=0.0,
            plan=plan,
            casts=0,
            trials=tuple(self.trials.tried.values()),
            evaluations=self.trials.evaluations,
            seconds=0.0,
            probes=self.search.probes,
            reused=len(self.trials.reused),
        )


def _engine_key(emulation: Emulation) -> str:
    """The device and what of it touches numbers: trials of others do not count."""
    parts = (
        emulation.target.name,
        emulation.rounding.value,
        emulation.seed,
        emulation.mixed_accumulation,
        emulation.saturate_infinity,
    )
    return ":".join(("emulator", *map(str, parts)))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
