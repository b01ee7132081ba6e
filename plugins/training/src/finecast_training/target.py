"""A training step as a tuning target: a copy of all of it, put back before each use.

What a user trains is never touched. Gradients and updates of fp32 are those of the step op by
op. Dropout is switched off while steps are compared, as two kernels draw other numbers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from finecast.errors import UsageError
from finecast.naming import kind_of
from finecast_training.measures import Exactness, StepFigures, deviations, with_digits
from finecast_training.step import (
    Loss,
    LossOf,
    check_arity,
    check_loss,
    check_trainable,
    first_line,
    users_code,
)

Batch: TypeAlias = tuple[Any, ...]
Call: TypeAlias = Callable[..., torch.Tensor]
Gradients: TypeAlias = dict[str, torch.Tensor]

_MOST_BATCHES: Final = 16
_OF_EACH: Final = 2
"""Batches on which gradients are compared at each moment of training."""
_SEED: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state of the model and of its optimizers after a number of steps."""

    steps: int
    model: Mapping[str, torch.Tensor]
    optimizers: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A batch at a checkpoint, with the gradients and the updates of fp32 there."""

    checkpoint: Checkpoint
    batch: Batch
    gradients: Gradients
    updates: Gradients


@dataclass(slots=True, kw_only=True)
class StepTarget:
    """A module with its loss, its optimizers and batches, all copies of what the user has.

    Attributes:
        module: Gives the loss of a batch.
        optimizers: The optimizers of its parameters; may be none.
        batches: Batches of one form.
        samples: What ways of computing the step are compared on.
    """

    module: LossOf
    optimizers: Sequence[Optimizer]
    batches: Sequence[Batch]
    samples: list[Sample] = field(default_factory=list[Sample])

    @classmethod
    def of(
        cls,
        model: nn.Module,
        loss: Loss,
        batches: Iterable[Any],
        optimizers: Sequence[Optimizer],
        *,
        moments: int,
        between: int,
    ) -> StepTarget:
        """The target, with samples at ``moments``, ``between`` steps of fp32 apart.

        The first is after as many steps: before, an optimizer may have no state to speak of.

        Raises:
            UsageError: If the step cannot be run in fp32, or has no gradients.
        """
        some = _batches(batches)
        check_trainable(model)
        check_arity(loss, some[0])
        _check_device(model, some[0])
        _check_trained(model, optimizers)
        try:
            module, own = copy.deepcopy((LossOf(model, loss), list(optimizers)))
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"the module and its optimizers cannot be copied: {first_line(error)}",
                where="model",
                fix="give the module before it is distributed or has run: a step is tuned on"
                " a copy, so that yours stays as it is",
            ) from error
        target = cls(module=module, optimizers=own, batches=some)
        with target.compared():
            target._sample(moments, between)
        return target

    def _sample(self, moments: int, between: int) -> None:
        first = self.checkpoint(0)
        for moment in range(moments):
            steps = range(moment * between, (moment + 1) * between)
            self.train(self._reference, [self.batch(i) for i in steps])
            here = self.checkpoint(steps.stop)
            for number in range(min(_OF_EACH, len(self.batches))):
                batch = self.batch(moment * _OF_EACH + number)
                gradients = self.gradients(self._reference, batch)
                _check_finite(gradients)
                updates = self.updates(gradients)
                self.restore(here)
                self.samples.append(
                    Sample(checkpoint=here, batch=batch, gradients=gradients, updates=updates)
                )
        self.restore(first)

    def _reference(self, *batch: Any) -> torch.Tensor:
        """The loss in fp32, op by op, as the user wrote it."""
        with users_code("loss"):
            return self.module(*batch)

    def batch(self, number: int) -> Batch:
        """A batch; after the last comes the first."""
        return self.batches[number % len(self.batches)]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by their names in the user's module."""
        named = self.module.module.named_parameters()
        return {name: p for name, p in named if p.requires_grad}

    @property
    def device(self) -> str:
        """The device that it runs on."""
        return next(iter(self.parameters.values())).device.type

    def checkpoint(self, steps: int) -> Checkpoint:
        """The state now."""
        state = self.module.state_dict()
        return Checkpoint(
            steps=steps,
            model={name: tensor.detach().clone() for name, tensor in state.items()},
            optimizers=[copy.deepcopy(o.state_dict()) for o in self.optimizers],
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint, in place; no gradients are left."""
        with torch.no_grad():
            for name, tensor in self.module.state_dict().items():
                tensor.copy_(checkpoint.model[name])
        for optimizer, state in zip(self.optimizers, checkpoint.optimizers, strict=True):
            _put_back(optimizer, state)
        self.module.zero_grad(set_to_none=True)

    def gradients(self, call: Call, batch: Batch, scale: float = 1.0) -> Gradients:
        """The gradients of a batch; of a loss times ``scale``, divided by that.

        Raises:
            UsageError: If the loss is not one number that depends on a parameter.
        """
        self.module.zero_grad(set_to_none=True)
        torch.manual_seed(_SEED)
        backward(call(*batch), scale)
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else _dense(p.grad) / scale
            for name, p in self.parameters.items()
        }
        self.module.zero_grad(set_to_none=True)
        return gradients

    def updates(self, gradients: Gradients) -> Gradients:
        """What the optimizers add to the parameters for these gradients; they do so."""
        if not self.optimizers:
            return {name: -gradient for name, gradient in gradients.items()}
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            p.grad = gradients[name].clone()
        self._update()
        self.module.zero_grad(set_to_none=True)
        return {
            n: (p.detach().double() - before[n].double()).float()
            for n, p in self.parameters.items()
        }

    def train(self, call: Call, batches: Iterable[Batch], scale: float = 1.0) -> list[float]:
        """Train on each of ``batches``; gives the losses."""
        return [float(self.step(call, batch, scale)) for batch in batches]

    def step(self, call: Call, batch: Batch, scale: float = 1.0) -> torch.Tensor:
        """One step: loss, gradients, update. Of a scaled loss Inf and NaN update nothing."""
        loss = call(*batch)
        backward(loss, scale)
        if scale != 1.0:
            for p in self.parameters.values():
                if p.grad is not None:
                    p.grad.div_(scale)
        if scale == 1.0 or all(
            bool(p.grad.isfinite().all())
            for p in self.parameters.values()
            if p.grad is not None
        ):
            self._update()
        self.module.zero_grad(set_to_none=True)
        return loss.detach()

    def _update(self) -> None:
        """A step of each optimizer."""
        for optimizer in self.optimizers:
            with users_code("optimizer"):
                optimizer.step()

    def exactness(
        self, call: Call, scale: float = 1.0, samples: Sequence[Sample] | None = None
    ) -> Exactness:
        """How far the gradients and updates of a way of computing the step are from fp32's."""
        gradients, updates = [], []
        for sample in self.samples if samples is None else samples:
            self.restore(sample.checkpoint)
            got = self.gradients(call, sample.batch, scale)
            # Optimizers as Adam make updates of the usual size of gradients that are noise.
            names = with_digits(sample.gradients)
            gradients.append(deviations(got, sample.gradients, names))
            updates.append(deviations(self.updates(got), sample.updates, names))
        self.restore(self.samples[0].checkpoint)
        return Exactness(gradients=StepFigures.of(gradients), updates=StepFigures.of(updates))

    @contextmanager
    def compared(self) -> Generator[None]:
        """A block without dropout, after which random numbers go on as before."""
        before: list[tuple[nn.Module, str, Any]] = []
        for module in self.module.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):  # pyright: ignore[reportPrivateUsage]
                before.append((module, "p", module.p))
            elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
                before.append((module, "dropout", module.dropout))
        try:
            for module, name, _ in before:
                setattr(module, name, 0.0)
            with torch.random.fork_rng():
                yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient, as that of an embedding may be sparse."""
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach()


def backward(loss: Any, scale: float = 1.0) -> None:
    """The gradients of a loss, times ``scale``.

    Raises:
        UsageError: If it is not one number that depends on a parameter.
    """
    check_loss(loss)
    (loss if scale == 1.0 else loss * scale).backward()


def _check_finite(gradients: Gradients) -> None:
    broken = [name for name, g in gradients.items() if not bool(g.isfinite().all())]
    if broken:
        raise UsageError(
            f"without any plan the gradient of {broken[-1]} has Inf or NaN",
            where="batches",
            fix="begin with parameters and batches on which training works in fp32",
        )


def _put_back(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give an optimizer its state back; ``load_state_dict`` would change its types."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.state.clear()
    for number, state in saved["state"].items():
        optimizer.state[held[number]] = copy.deepcopy(state)
    for group, before in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({name: x for name, x in before.items() if name != "params"})


def _batches(source: Iterable[Any]) -> list[Batch]:
    """The first batches, each a tuple of what the loss gets after the module."""
    batches: list[Batch] = []
    for number, batch in enumerate(islice(iter(source), _MOST_BATCHES)):
        if not isinstance(batch, tuple | list):
            raise UsageError(
                f"batch {number} is {kind_of(batch)}, and no tuple",
                where="batches",
                fix="give a list of batches, each a tuple of what the loss gets after the"
                " module, as [(x, y), (x, y)]",
            )
        batches.append(tuple(batch))
        if _form(batches[-1]) != _form(batches[0]):
            raise UsageError(
                f"batch {number} has the form {_form(batches[-1])}, the first"
                f" {_form(batches[0])}",
                where="batches",
                fix="give batches of one size: leave out a last one that is smaller",
            )
    if not batches:
        raise UsageError("there is no batch", where="batches", fix="give one or more")
    return batches


def _form(batch: Batch) -> list[str]:
    return [
        f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        if isinstance(x, torch.Tensor)
        else type(x).__name__
        for x in batch
    ]


def _check_device(model: nn.Module, batch: Batch) -> None:
    first = next(model.parameters(), None)
    if first is None:
        return
    for number, x in enumerate(batch):
        if isinstance(x, torch.Tensor) and x.device.type != first.device.type:
            raise UsageError(
                f"the module is on {first.device.type}, and tensor {number} of a batch on"
                f" {x.device.type}",
                where="batches",
                fix="move batches or module to one device",
            )


def _check_trained(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    if not trained:
        raise UsageError(
            "no parameter of the module requires a gradient",
            where="model",
            fix="call model.requires_grad_(), or tune inference with finecast.torch.tune",
        )
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    if optimizers and not held & trained:
        raise UsageError(
            "the optimizer has none of the module's parameters",
            where="optimizer",
            fix="make it of model.parameters(), of the same module",
        )


def optimizers_of(argument: Any) -> list[Optimizer]:
    """The optimizers that a user gave: one, several or none.

    Raises:
        UsageError: If one is something else, or computes the loss by itself.
    """
    several = isinstance(argument, Iterable)
    optimizers: list[Any] = [] if argument is None else [*argument] if several else [argument]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            scheduler = isinstance(optimizer, LRScheduler | ReduceLROnPlateau)
            raise UsageError(
                f"{kind_of(optimizer)} is no optimizer",
                where="optimizer",
                fix="give the optimizer that it schedules: scheduler.optimizer"
                if scheduler
                else "give a torch.optim.Optimizer, or a list of them",
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"{kind_of(optimizer)} needs a closure, by which it computes the loss several"
                " times a step: no single update can be compared",
                where="optimizer",
                fix="leave optimizer out, and gradients alone are compared",
            )
    return optimizers


def check_callable(model: Any, loss: Any) -> None:
    """Raise UsageError unless these are a module and a function."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{kind_of(model)} is no module", where="model", fix="give a torch.nn.Module"
        )
    if not callable(loss):
        raise UsageError(
            f"{kind_of(loss)} is no loss",
            where="loss",
            fix="give a function of the module and a batch, as"
            " lambda net, x, y: cross_entropy(net(x), y)",
        )
