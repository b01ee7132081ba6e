"""Faults of a training step that no plan can mend, each named with what to do about it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Final

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.optim import Optimizer

from finecast.errors import FinecastError, first_line
from finecast.naming import listed, percent
from finecast_training.measures import StepFigures
from finecast_training.target import Gradients, Sample, StepTarget

_LOW: Final = frozenset({torch.bfloat16, torch.float16})
# The share of changes that are lost from which on training stalls.
STALLED: Final = 0.1
_NAMED: Final = 3


def refusal(error: RuntimeError) -> str:
    """Why a plan cannot be run here: the words of the kernel or of the rules that refuse it.

    Raises:
        Exception: The error itself, if it is another fault than these.
    """
    cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
    if isinstance(cause, FinecastError):
        return cause.what
    if not isinstance(cause, RuntimeError):
        raise error
    return first_line(cause)


def overflow(figures: StepFigures) -> str:
    """Where gradients begin to be Inf or NaN; empty if all are finite.

    Parameters are in the order of the forward pass: the backward pass comes to the last first.
    """
    if not figures.broken:
        return ""
    *others, first = figures.broken
    before = f", then in {len(others)} before it" if others else ""
    return (
        f"overflow: Inf or NaN first in the gradient of {first}"
        f" ({percent(figures.broken[first])} of its elements){before}"
    )


def stalled(target: StepTarget) -> list[str]:
    """Parameters and states of optimizers in low formats that do not take their updates.

    An update of less than half a unit in the last place is lost by rounding, in each step
    anew: it never adds up. The same step is done in fp32, and what moves there and not here is
    counted.
    """
    sample = target.samples[-1]
    target.restore(sample.checkpoint)
    if not any(t.dtype in _LOW for t in _kept(target).values()):
        return []
    low, exact = (_moved(target, sample, wide=wide) for wide in (False, True))
    notes: dict[str, list[str]] = {}
    for name, (what, moved) in low.items():
        if what not in _LOW or name not in exact:
            continue
        due = exact[name][1]
        lost = float((~moved & due).sum()) / max(float(due.sum()), 1.0)
        if lost > STALLED:
            label = str(what).removeprefix("torch.")
            notes.setdefault(label, []).append(f"{name} ({percent(lost)})")
    return [
        f"updates stall: in {label} changes of less than half a unit in the last place are"
        f" lost, of {listed(names, _NAMED)}; keep them in fp32"
        for label, names in notes.items()
    ]


Moved = Mapping[str, tuple[torch.dtype, torch.Tensor]]


def _moved(target: StepTarget, sample: Sample, *, wide: bool) -> Moved:
    """Which elements of parameters and states a step changes, in their formats or in fp32."""
    target.restore(sample.checkpoint)
    module, optimizers = copy.deepcopy((target.module, list(target.optimizers)))
    own = StepTarget(module=module, optimizers=optimizers, batches=target.batches)
    if wide:
        _widen(module, optimizers)
    gradients: Gradients = {
        name: sample.gradients[name].to(p.dtype) for name, p in own.parameters.items()
    }
    before = {name: t.clone() for name, t in _kept(own).items()}
    own.updates(gradients)
    target.restore(target.samples[0].checkpoint)
    after = _kept(own)
    return {name: (t.dtype, after[name] != t) for name, t in before.items() if name in after}


def _kept(target: StepTarget) -> dict[str, torch.Tensor]:
    """Parameters, and the floats of their optimizers' states, by name."""
    kept: dict[str, torch.Tensor] = {}
    for name, p in target.parameters.items():
        kept[name] = p.detach()
        for optimizer in target.optimizers:
            state = optimizer.state.get(p, {})
            kept |= {
                f"{key} of {name}": x
                for key, x in state.items()
                if isinstance(x, torch.Tensor) and x.shape == p.shape and x.is_floating_point()
            }
    return kept


def _widen(module: nn.Module, optimizers: list[Optimizer]) -> None:
    """Take parameters and states to fp32, in place."""
    for p in module.parameters():
        if p.dtype in _LOW:
            p.data = p.data.float()
    for optimizer in optimizers:
        for state in optimizer.state.values():
            state |= {
                key: x.float()
                for key, x in state.items()
                if isinstance(x, torch.Tensor) and x.dtype in _LOW
            }
