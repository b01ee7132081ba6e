"""The baseline metric: that of the fp64 model where the fp32 one was converted from it."""

from __future__ import annotations

from finecast.data.criterion import Criterion
from finecast.engines.base import Session
from finecast.errors import WrongNumbersError
from finecast.pipeline.workload import Workload


def baseline_of(
    workload: Workload, criterion: Criterion, reference: Session, truth: Session | None
) -> float:
    """The metric to keep: of ``truth``, the fp64 model, where there is one, else of fp32.

    Raises:
        WrongNumbersError: If the conversion from fp64 to fp32 alone misses the criterion.
    """
    baseline = workload.evaluate(truth or reference, None)
    if truth is None:
        return baseline
    taken = workload.evaluate(reference, truth)
    if not criterion.passes(taken, baseline):
        raise WrongNumbersError(
            f"taken to fp32 the model misses the criterion by itself: {taken:.6g}, and"
            f" {baseline:.6g} in fp64",
            where="--from-type fp64",
            fix="it needs fp64: leave it as it is, or allow more by --tolerance",
        )
    return baseline
