"""A user's evaluation of a module in memory, which gets the module itself.

The calls of the module in it are recorded, and given again without a run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from finecast.data.function_workload import JudgedByFunction
from finecast.data.functions import (
    OtherCallError,
    Recording,
    Replacement,
    check_baseline,
    check_finite,
    metric_value,
    quietly,
)
from finecast.data.implied_labels import implied_labels, seconds_for
from finecast.data.metrics import Score
from finecast.engines.base import Array, Feeds, Session
from finecast.engines.exact import CachedSession
from finecast.engines.torch.session import ModuleSession, ProgramSignature
from finecast.errors import UserCodeError
from finecast.frontends.torch.draws import fixed_draws
from finecast.frontends.torch.input_check import InputCheck, OtherSizes
from finecast.frontends.torch.reader import tensors_digest
from finecast.native.model import OpenedModel, OtherSizesError
from finecast.usercode import guarded

Evaluate = Callable[[torch.nn.Module], float]


@dataclass(slots=True, kw_only=True)
class ModuleWorkload(JudgedByFunction):
    """A user's evaluation of a module, which is timed on its example inputs.

    Attributes:
        known: Its value for the fp32 module, if that is known already.
        examples: The module's example inputs.
        signature: The arguments and results of the module.
        inputs: The check of a call's inputs; None for none.
        freed: Captures the module anew, with the sizes free that calls differ in; None where
            that was done already, and is not done again.
    """

    learns: ClassVar[tuple[str, ...]] = ("implied",)

    known: float | None
    examples: Feeds
    signature: ProgramSignature
    inputs: InputCheck | None = None
    freed: Callable[[OtherSizes], OpenedModel] | None = None

    def evaluate(self, session: Session, reference: Session | None) -> float:
        """The function's value for the session's module; for fp32 ``known``, if given.

        Raises:
            UserCodeError: If the function fails, or what it returns for fp32 says nothing.
            OtherSizesError: If it calls fp32 with sizes that the module was not captured for.
        """
        if reference is None and self.known is not None:
            return self.known
        subject = self._evaluated(session)
        if reference is not None and self.implied is None:
            return self._called(subject)
        inputs = self.inputs if reference is None and self.freed is not None else None
        calls, start = RecordedCalls(subject.module, inputs), perf_counter()
        try:
            with calls.recorded():
                value = self._called(subject)
        except UserCodeError:
            # It may compile the module as one graph, and then needs it as it is.
            value = self._called(subject)
            if reference is None:
                check_finite(value, self.name)
            return value
        seconds = perf_counter() - start
        if calls.other_sizes is not None and self.freed is not None:
            raise OtherSizesError(
                calls.other_sizes.text,
                where=self.name,
                fix="give example_inputs of the sizes that it calls the module with",
                freed=partial(self.freed, calls.other_sizes),
            )
        if reference is not None:
            return self._with_margins(value, calls.outputs)
        check_baseline(
            value,
            self.name,
            runs=calls.runs > 0,
            again=lambda: self._within(subject, calls.replayed()),
            replaced=lambda how: (
                self._within(subject, calls.replaced(how)) if calls.is_whole else None
            ),
            call="the module",
        )
        if self.higher_is_better:
            self.implied = implied_labels(
                value,
                calls.outputs,
                lambda name, arrays: quietly(
                    lambda: self._within(subject, calls.exchanged(name, arrays))
                ),
                seconds_for(seconds),
            )
        return self._with_margins(value, calls.outputs)

    def _evaluated(self, session: Session) -> EvaluatedModule:
        """What the function gets of a session: its module, or one that runs the session."""
        while isinstance(session, CachedSession):
            session = session.session
        if isinstance(session, ModuleSession):
            return EvaluatedModule(module=session.module, draws=session.draws)
        return EvaluatedModule(module=SessionModule(session, self.signature))

    def _within(self, subject: EvaluatedModule, calls: AbstractContextManager[None]) -> Score:
        with calls:
            return self._called(subject)

    def _called(self, subject: EvaluatedModule) -> Score:
        """The function's value; random ops draw the same numbers for each module."""
        with (
            torch.no_grad(),
            fixed_draws(subject.draws),
            guarded(
                "the evaluation function failed",
                where=self.name,
                fix="it gets a module and returns a number: try it on the fp32 module",
            ),
        ):
            value = self.function(subject.module)
        return metric_value(value, self.name)

    def calibration(self) -> Iterable[Feeds]:
        """The calibration feeds; without them the module's example inputs."""
        return (self.examples,) if self.calibrate is None else self.calibrate()

    def timing(self) -> Sequence[Feeds]:
        """The module's example inputs."""
        return (self.examples,)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModule:
    """A module that a function of the user's gets, and the draws of its random ops."""

    module: torch.nn.Module
    draws: Sequence[int] | None = None


class SessionModule(torch.nn.Module):
    """A module that computes by a session, such as that of a device's emulator."""

    def __init__(self, session: Session, signature: ProgramSignature) -> None:
        super().__init__()
        self._session, self._signature = session, signature

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the session gives, as the results of the program."""
        return self._signature.results(self._session.run(self._signature.feeds(args, kwargs)))


Forward = Callable[..., Any]


class RecordedCalls:
    """The outputs that a module gave in an evaluation.

    The module's own ``forward`` is put in another's place for as long as an evaluation takes,
    so that ``module(x)``, hooks and ``module.forward(x)`` all work as they did. With
    ``inputs`` the sizes of the calls are compared with those that the module was captured for.
    """

    def __init__(self, module: torch.nn.Module, inputs: InputCheck | None = None) -> None:
        self.module = module
        self.runs = 0
        self.other_sizes: OtherSizes | None = None
        self._inputs = inputs
        self._recording = Recording[Any]()
        self._own: Forward = module.forward

    @contextmanager
    def recorded(self) -> Generator[None]:
        """Record the outputs of calls inside."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = _key((args, kwargs))  # before the call, which may write to its inputs
            if self._inputs is not None:
                self.other_sizes = self._inputs.other_sizes(args, kwargs, self.other_sizes)
            outputs = self._own(*args, **kwargs)
            self.runs += 1
            tensors = [*_tensors(outputs)]
            if tensors:
                size_bytes = sum(t.numel() * t.element_size() for t in tensors)
                self._recording.keep(key, _copied(outputs), size_bytes)
            else:
                self._recording.lose()
            return outputs

        with self._instead(forward):
            yield

    @contextmanager
    def replayed(self) -> Generator[None]:
        """Give the outputs again for calls inside; for other inputs the module runs."""
        recording = self._recording.again()

        def forward(*args: Any, **kwargs: Any) -> Any:
            known = recording.next(lambda: _key((args, kwargs)))
            return self._own(*args, **kwargs) if known is None else _copied(known)

        with self._instead(forward):
            yield

    @property
    def is_whole(self) -> bool:
        """Whether the outputs of all calls are known."""
        return self.runs > 0 and self._recording.is_whole

    @contextmanager
    def replaced(self, replacement: Replacement) -> Generator[None]:
        """Give replaced outputs for calls inside; other calls fail, and nothing is run."""

        def changed(leaf: Any) -> Any:
            return _replaced(leaf, replacement) if isinstance(leaf, torch.Tensor) else leaf

        with self._given(self._recording.again(), changed):
            yield

    @property
    def outputs(self) -> Sequence[Mapping[str, Array]]:
        """The tensors of each call by their position; none where not all calls are known."""
        return [
            {str(i): _array(tensor) for i, tensor in enumerate(_tensors(tree))}
            for tree in (self._recording.outputs if self.is_whole else ())
        ]

    @contextmanager
    def exchanged(self, name: str, arrays: Sequence[Array]) -> Generator[None]:
        """Give the outputs again, one of them another array in each call; nothing is run."""
        trees: list[Any] = []
        for tree, array in zip(self._recording.outputs, arrays, strict=True):
            old = [*_tensors(tree)][int(name)]
            new = torch.from_numpy(array).to(device=old.device, dtype=old.dtype)
            trees.append(
                tree_map(lambda leaf, old=old, new=new: new if leaf is old else leaf, tree)
            )
        with self._given(Recording[Any].of(trees), lambda leaf: leaf):
            yield

    @contextmanager
    def _given(
        self, recording: Recording[Any], changed: Callable[[Any], Any]
    ) -> Generator[None]:
        """Give recorded outputs for calls inside, each leaf changed; other calls fail."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            known = recording.next(lambda: _key((args, kwargs)))
            if known is None:
                raise OtherCallError
            return tree_map(changed, known)

        with self._instead(forward):
            yield

    @contextmanager
    def _instead(self, forward: Forward) -> Generator[None]:
        """``forward`` in place of the module's own."""
        attributes = self.module.__dict__
        before = {k: attributes[k] for k in ("forward",) if k in attributes}
        attributes["forward"] = torch.compiler.disable(functools.wraps(self._own)(forward))
        try:
            yield
        finally:
            del attributes["forward"]
            attributes.update(before)


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _copied(tree: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, tree)


def _replaced(tensor: torch.Tensor, replacement: Replacement) -> torch.Tensor:
    """A tensor of replaced numbers; numpy has no arrays of bf16."""
    changed = torch.from_numpy(replacement(_array(tensor)).copy())
    return changed.to(device=tensor.device, dtype=tensor.dtype)


def _array(tensor: torch.Tensor) -> Array:
    """The numbers of a tensor; floats as fp32."""
    plain = tensor.detach().cpu()
    return (plain.float() if plain.is_floating_point() else plain).numpy()


def _key(inputs: Any) -> bytes:
    """Tells inputs apart by what their tensors hold."""
    leaves = {str(i): leaf for i, leaf in enumerate(tree_leaves(inputs))}
    others = {i: leaf for i, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)}
    return tensors_digest(leaves) + repr(others).encode()
