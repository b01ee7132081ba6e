"""A training step as a tuning target: a copy of all of it, put back before each use.

What a user trains is never touched. Gradients and updates of fp32 are those of the step op by
op. Dropout is switched off while steps are compared, as two kernels draw other numbers.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from finecast.errors import UsageError, first_line
from finecast.naming import kind_of
from finecast.processes import available_bytes
from finecast_training.measures import (
    Exactness,
    GradientDeviation,
    StepFigures,
    deviations,
    with_digits,
)
from finecast_training.optimizer_states import HeldStates
from finecast_training.step import (
    Loss,
    LossOf,
    check_arity,
    check_loss,
    check_trainable,
    users_code,
)

Batch: TypeAlias = tuple[Any, ...]
Call: TypeAlias = Callable[..., torch.Tensor]
Gradients: TypeAlias = dict[str, torch.Tensor]

_MOST_BATCHES: Final = 16
_SEED: Final = 0
_MOST_HELD: Final = 0.25
"""The largest share of the free memory that samples may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """At what moments of training, and on how many batches, gradients are compared.

    Attributes:
        moments: The number of moments.
        between: Steps of fp32 before each of them.
        batches: Batches at each.
    """

    moments: int
    between: int
    batches: int = 2

    @property
    def words(self) -> str:
        """On what gradients and updates are compared."""
        batches, moments = (
            f"{number} {noun}{'s' if number > 1 else ''}"
            for number, noun in ((self.batches, "batch"), (self.moments, "moment"))
        )
        batches = batches.replace("batchs", "batches")
        return f"on {batches} at {moments} of training, after each {self.between} steps"

    @property
    def samples(self) -> int:
        """Batches at moments."""
        return self.moments * self.batches

    @property
    def steps(self) -> int:
        """The steps of fp32 that the samples take, with their own gradients."""
        return self.moments * self.between + self.samples


_SAMPLINGS: Final = (
    Sampling(moments=3, between=4),
    Sampling(moments=3, between=2, batches=1),
    Sampling(moments=2, between=2, batches=1),
    Sampling(moments=1, between=2, batches=1),
)
# So many times a sample is compared with: under autocast op by op, then with compiled steps.
_USES: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What a step of fp32 takes.

    Attributes:
        seconds: Of the step, op by op, with its update.
        state_bytes: Of the module's and the optimizers' state.
        sample_bytes: Of gradients and updates.
        free_bytes: Of the device's memory that is not in use.
    """

    seconds: float
    state_bytes: int
    sample_bytes: int
    free_bytes: int

    def sampling(
        self, seconds: float, moments: int | None = None, between: int | None = None
    ) -> Sampling:
        """The most samples that so many seconds, and the memory that is free, allow.

        Args:
            seconds: For taking samples, and comparing on them.
            moments: The number of moments, if that is stated.
            between: The steps between them, if these are stated.
        """
        most_bytes = _MOST_HELD * self.free_bytes
        choices = [
            replace(
                one,
                moments=moments or one.moments,
                between=one.between if between is None else between,
            )
            for one in _SAMPLINGS
        ]
        for choice in choices:
            held = choice.moments * self.state_bytes + choice.samples * self.sample_bytes
            steps = choice.steps + _USES * choice.samples
            if held <= most_bytes and steps * self.seconds <= seconds:
                return choice
        return choices[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state of the model and of its optimizers at a moment of training."""

    model: Mapping[str, torch.Tensor]
    optimizers: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A batch at a checkpoint, with the gradients and the updates of fp32 there.

    Attributes:
        checkpoint: Where training is.
        batch: The batch.
        gradients: Gradients by parameter.
        updates: What the optimizers make of them; empty without optimizers.
        names: Parameters whose gradients are not zero but for roundings. Optimizers as Adam
            make updates of the usual size of gradients that are noise.
    """

    checkpoint: Checkpoint
    batch: Batch
    gradients: Gradients
    updates: Gradients
    names: Sequence[str]


@dataclass(slots=True, kw_only=True)
class StepTarget:
    """A module with its loss, its optimizers and batches, all copies of what the user has.

    Attributes:
        module: Gives the loss of a batch.
        optimizers: The optimizers of its parameters; may be none.
        batches: Batches of one form.
        samples: What ways of computing the step are compared on.
        held: What is held in a low format within a block of ``holding``.
    """

    module: LossOf
    optimizers: Sequence[Optimizer]
    batches: Sequence[Batch]
    samples: list[Sample] = field(default_factory=list[Sample])
    held: HeldStates | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        loss: Loss,
        batches: Iterable[Any],
        optimizers: Sequence[Optimizer],
        sampling: Sampling | None = None,
    ) -> StepTarget:
        """The target, with the samples of a sampling if there is one.

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
        if sampling is not None:
            target.sample(sampling)
        return target

    def sample(self, sampling: Sampling) -> None:
        """Take samples: the first batch of each moment, then the second of each.

        The first moment is after as many steps as lie between two: at the start an optimizer
        has no state to speak of.
        """
        first, between = self.checkpoint(), sampling.between
        each = min(sampling.batches, len(self.batches))
        taken: list[list[Sample]] = []
        with self.compared():
            for moment in range(sampling.moments):
                steps = range(moment * between, (moment + 1) * between)
                self.train(self._reference, [self.batch(i) for i in steps])
                here = self.checkpoint()
                numbers = range(moment * sampling.batches, moment * sampling.batches + each)
                taken.append([self._sampled(here, self.batch(i)) for i in numbers])
        self.samples = [sample for of in zip(*taken, strict=True) for sample in of]
        self.restore(first)

    def _sampled(self, here: Checkpoint, batch: Batch) -> Sample:
        """A sample at the checkpoint at which the target is, and stays."""
        gradients = self.gradients(self._reference, batch)
        _check_finite(gradients)
        updates: Gradients = {}
        if self.optimizers:
            updates = self.updates({name: g.clone() for name, g in gradients.items()})
            self.restore(here)
        names = with_digits(gradients)
        return Sample(
            checkpoint=here, batch=batch, gradients=gradients, updates=updates, names=names
        )

    def cost(self) -> StepCost:
        """What a step in fp32 takes: one is done op by op, and undone."""
        first = self.checkpoint()
        with self.compared():
            begin = time.perf_counter()
            self.train(self._reference, [self.batch(0)])
            seconds = time.perf_counter() - begin
        states = (state.values() for o in self.optimizers for state in o.state.values())
        kept = [*self.module.state_dict().values(), *(x for of in states for x in of)]
        cost = StepCost(
            seconds=seconds,
            state_bytes=sum(x.nbytes for x in kept if isinstance(x, torch.Tensor)),
            sample_bytes=sum(p.nbytes for p in self.parameters.values())
            * (2 if self.optimizers else 1),
            free_bytes=torch.cuda.mem_get_info()[0]
            if self.device == "cuda"
            else available_bytes(),
        )
        self.restore(first)
        return cost

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

    def checkpoint(self) -> Checkpoint:
        """The state now."""
        state = self.module.state_dict()
        return Checkpoint(
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
        if self.held is not None:
            self.held.round()
        self.module.zero_grad(set_to_none=True)

    def gradients(self, call: Call, *batches: Batch, scale: float = 1.0) -> Gradients:
        """The sum of batches' gradients; of losses times ``scale``, divided by that.

        Raises:
            UsageError: If the loss is not one number that depends on a parameter.
        """
        self.module.zero_grad(set_to_none=True)
        torch.manual_seed(_SEED)
        for batch in batches:
            backward(call(*batch), scale)
        gradients = {
            name: torch.zeros_like(p, dtype=p.grad_dtype)
            if p.grad is None
            else _unscaled(p.grad, scale)
            for name, p in self.parameters.items()
        }
        self.module.zero_grad(set_to_none=True)
        return gradients

    def updates(self, gradients: Gradients) -> Gradients:
        """What the optimizers add to the parameters for these gradients; they do so.

        The gradients are theirs, and may be changed.
        """
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            p.grad = gradients[name]
        self._update()
        self.module.zero_grad(set_to_none=True)
        return {n: _apart(p.detach(), before[n]) for n, p in self.parameters.items()}

    def train(
        self,
        call: Call,
        batches: Iterable[Batch],
        scale: float = 1.0,
        *,
        micro_batches: int = 1,
    ) -> list[float]:
        """Train on ``batches``, so many of them for each update; gives the losses."""
        return [
            float(self.step(call, batch, scale, updates=number % micro_batches == 0))
            for number, batch in enumerate(batches, 1)
        ]

    def step(
        self, call: Call, batch: Batch, scale: float = 1.0, *, updates: bool = True
    ) -> torch.Tensor:
        """One step: loss, gradients, update. Of a scaled loss Inf and NaN update nothing."""
        loss = call(*batch)
        backward(loss, scale)
        if not updates:
            return loss.detach()
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
            got = self.gradients(call, sample.batch, scale=scale)
            gradients.append(deviations(got, sample.gradients, sample.names))
            if self.optimizers:
                updates.append(deviations(self.updates(got), sample.updates, sample.names))
        self.restore(self.samples[0].checkpoint)
        # Without optimizers an update is the gradient, in the other direction.
        return Exactness(
            gradients=StepFigures.of(gradients), updates=StepFigures.of(updates or gradients)
        )

    def exact(self) -> Exactness:
        """The figures of the step in fp32 op by op, with which others are compared."""
        none = GradientDeviation(error=0.0, angle=0.0, vanished=0.0, nonfinite=0.0)
        figures = StepFigures.of([dict.fromkeys(s.names, none) for s in self.samples])
        return Exactness(gradients=figures, updates=figures)

    @contextmanager
    def holding(self, states: Sequence[str], dtype: torch.dtype) -> Generator[None]:
        """A block in which states of the optimizers, by name, are held in a low format."""
        if states:
            self.held = HeldStates(self.optimizers, states, dtype)
        try:
            yield
        finally:
            if self.held is not None:
                self.held.release()
            self.held = None

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


def _apart(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The difference in fp32, in the memory of ``before`` if that is fp32."""
    if before.dtype is torch.float32:
        return torch.sub(after, before, out=before)
    return (after.double() - before.double()).float()


def _unscaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """A gradient, as that of an embedding may be sparse, divided by the loss's scale."""
    dense = (gradient.to_dense() if gradient.is_sparse else gradient).detach()
    return dense if scale == 1.0 else dense / scale


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
    states = dict(optimizer.state)
    optimizer.state.clear()
    for number, state in saved["state"].items():
        optimizer.state[held[number]] = _copied(state, states.get(held[number], {}))
    for group, before in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({name: x for name, x in before.items() if name != "params"})


def _copied(state: Mapping[str, Any], memory: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the state of a parameter, in the memory that it had if that fits.

    New memory costs far more than copying does, and a state is of its parameter's size.
    """
    copied: dict[str, Any] = {}
    for name, saved in state.items():
        old = memory.get(name)
        if torch.is_tensor(saved) and torch.is_tensor(old) and _is_alike(saved, old):
            copied[name] = old.copy_(saved)
        else:
            copied[name] = copy.deepcopy(saved)
    return copied


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype is other.dtype and one.device == other.device
    return same and one.shape == other.shape and one.layout is other.layout


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


def same_form(batches: Iterable[Batch]) -> list[Batch]:
    """Those with the form of the first, as the last batch of an epoch may be smaller."""
    first, *others = batches
    return [first, *(batch for batch in others if _form(batch) == _form(first))]


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
