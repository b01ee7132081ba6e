"""Many steps of optimizers, replayed with and without states in a low format.

What a low state does shows late: a mean of squares that moves by a thousandth of its distance
a step grows by a tenth in the tenth step, which bf16 takes, and by less than half a unit in
the last place after some hundred steps, from where on it stands still. So many steps cannot be
trained while a plan is searched. They are replayed: on some elements of each parameter, whose
gradients are those of the samples, each times a random number.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from finecast.naming import percent
from finecast_training.faults import STALLED
from finecast_training.measures import ALIKE, StepFigures, deviations, mean
from finecast_training.optimizer_states import HeldStates
from finecast_training.target import StepTarget

_STEPS: Final = 400
_ELEMENTS: Final = 256
"""Of each parameter, from its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What states in a low format do to the last of many steps of the optimizers.

    Attributes:
        lost: The share of the changes of a state that do not change it, by state.
        error: The relative error of the update, as of ``StepFigures``.
        dtype: The format.
    """

    lost: Mapping[str, float]
    error: float
    dtype: torch.dtype

    @classmethod
    def of(cls, exact: Replayed, states: Sequence[str], dtype: torch.dtype) -> Replay:
        """Replay the steps of ``exact`` with some states in a format."""
        low = Replayed(exact.target, states, dtype)
        lost = {
            name: float((~moved & exact.moved[name]).sum())
            / max(float(exact.moved[name].sum()), 1.0)
            for name, moved in low.moved.items()
            if name in states
        }
        names = [n for n, update in exact.updates.items() if bool(update.any())]
        figures = StepFigures.of([deviations(low.updates, exact.updates, names)])
        return cls(lost=lost, error=mean(figures.error), dtype=dtype)

    def objection(self, own: StepFigures, most: StepFigures) -> str:
        """Why the states are not to be held so; empty if they may be.

        Args:
            own: The updates of the plan with states in fp32.
            most: Those of autocast, which may not be exceeded.
        """
        label = str(self.dtype).removeprefix("torch.")
        for name, share in self.lost.items():
            if share > STALLED:
                return (
                    f"it would stall, as {percent(share)} of the changes of {name} are less"
                    f" than half a unit in the last place of {label}"
                )
        allowed = ALIKE * mean(most.error[: len(own.error)])
        error = math.hypot(mean(own.error), self.error)
        if not error <= allowed:
            return (
                f"in {label} updates would be off by {percent(error)}, those of torch.autocast"
                f" by {percent(mean(most.error[: len(own.error)]))}"
            )
        return ""


class Replayed:
    """Many steps of optimizers, from what a target is now, on parts of its parameters.

    Args:
        target: The step.
        states: States that are held in a low format.
        dtype: The format.

    Attributes:
        moved: Which elements the last step changed, by state.
        updates: The last step's updates by parameter.
    """

    def __init__(
        self,
        target: StepTarget,
        states: Sequence[str] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.target = target
        self._parameters = {
            name: nn.Parameter(_some(p).clone()) for name, p in target.parameters.items()
        }
        parts: dict[torch.Tensor, nn.Parameter] = {
            p: self._parameters[name] for name, p in target.parameters.items()
        }
        self._optimizers = [_copied(optimizer, parts) for optimizer in target.optimizers]
        if states:
            HeldStates(self._optimizers, states, dtype)
        self._run(_STEPS - 1)
        kept = self._states()
        before = {n: p.detach().clone() for n, p in self._parameters.items()}
        self._run(1)
        after = self._states()
        self.moved = {name: after[name] != own for name, own in kept.items()}
        self.updates = {n: p.detach() - before[n] for n, p in self._parameters.items()}

    def _run(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        gradients = [
            torch.cat([_some(sample.gradients[name]) for name in self._parameters])
            for sample in self.target.samples
        ]
        sizes = [p.numel() for p in self._parameters.values()]
        for number in range(steps):
            gradient = gradients[number % len(gradients)]
            drawn = torch.randn(len(gradient), generator=generator).to(gradient)
            pieces = (gradient * drawn).split(sizes)
            for p, piece in zip(self._parameters.values(), pieces, strict=True):
                p.grad = piece.to(p.dtype)
            for optimizer in self._optimizers:
                optimizer.step()

    def _states(self) -> dict[str, torch.Tensor]:
        """Copies of the states that have an element for each of a parameter's, by name."""
        copies: dict[str, list[torch.Tensor]] = {}
        for optimizer in self._optimizers:
            for p, state in optimizer.state.items():
                for name, x in state.items():
                    if isinstance(x, torch.Tensor) and x.shape == p.shape:
                        copies.setdefault(name, []).append(x.float())
        return {name: torch.cat(some) for name, some in copies.items()}


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """The first elements, in one row."""
    return tensor.detach().flatten()[:_ELEMENTS]


def _copied(optimizer: Optimizer, parts: Mapping[torch.Tensor, nn.Parameter]) -> Optimizer:
    """An optimizer as this one, of the parts of those parameters that have one."""
    own = copy.copy(optimizer)
    groups = [
        {**group, "params": [parts[p] for p in group["params"] if p in parts]}
        for group in optimizer.param_groups
    ]
    own.param_groups = [group for group in groups if group["params"]]
    own.state = defaultdict(dict)
    for p, state in optimizer.state.items():
        if p in parts:
            own.state[parts[p]] = {name: _part(x, p) for name, x in state.items()}
    return own


def _part(value: Any, p: torch.Tensor) -> Any:
    """What of a state belongs to the part of its parameter."""
    if isinstance(value, torch.Tensor) and value.shape == p.shape:
        return _some(value).clone()
    return copy.deepcopy(value)
