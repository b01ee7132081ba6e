"""Coverage: how much of a compiled function was planned, and why the rest was not.

Dynamo does not capture some parts of a function: recurrent layers, code that it cannot trace.
They run op by op in fp32. The FLOPs of planned graphs and of recurrent layers are counted.
Those of code that was not captured are estimated: as many per weight as in planned graphs.
Code that uses no weights of the function's modules is not counted at all.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch.nn.utils.rnn import PackedSequence
from torch.utils.weak import WeakTensorKeyDictionary

from finecast.ops.flops import recurrent_flops

# The unplanned share of FLOPs from which on there is a warning.
_SUBSTANTIAL: Final = 0.1
_NAMED: Final = 4
_RECURRENT: Final = (nn.RNN, nn.LSTM, nn.GRU)
_LOOKED_UP: Final = (nn.Embedding, nn.EmbeddingBag)
_RECURRENT_REASON: Final = (
    "PyTorch's compiler runs recurrent layers as they are (it unrolls them, step by step, "
    "with torch._dynamo.config.allow_rnn = True)"
)
# Gradients of inputs and of weights take a product each, like that of the forward pass.
_WITH_GRADIENTS: Final = 3.0


# FLOPs of each recurrent layer that ran so far in the current call; None outside of calls.
_RAN: ContextVar[list[float] | None] = ContextVar("ran", default=None)


def _opaque(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` of a recurrent layer, excluded from Dynamo; records its FLOPs."""

    @functools.wraps(forward)
    def run(layer: nn.RNNBase, given: Any, *args: Any, **kwargs: Any) -> Any:
        ran = _RAN.get()
        if ran is not None:
            ran.append(_flops(layer, given))
        return forward(layer, given, *args, **kwargs)

    return torch.compiler.disable(run, reason="recurrent layers run as they are")


def _flops(layer: nn.RNNBase, given: torch.Tensor | PackedSequence) -> float:
    data = given.data if isinstance(given, PackedSequence) else given
    matrices = [p for p in layer.parameters() if p.dim() > 1]
    trained = torch.is_grad_enabled() and any(p.requires_grad for p in matrices)
    forward = recurrent_flops(data.numel() / data.shape[-1], sum(p.numel() for p in matrices))
    return forward * (_WITH_GRADIENTS if trained else 1.0)


_OPAQUE: Final = {kind: _opaque(kind.forward) for kind in _RECURRENT}


class Coverage:
    """The FLOPs of a function, and how many of them are in planned graphs.

    Counted are calls in which a graph was compiled, with their backward passes.

    Attributes:
        planned_flops: FLOPs of planned graphs.
        recurrent_flops: FLOPs of recurrent layers, which are not planned.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.modules = tuple(_modules_of(function))
        self.read = WeakTensorKeyDictionary()
        self.said = False
        self.planned_flops = 0.0
        self.recurrent_flops = 0.0

    def add(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Record the parameters that a planned graph reads."""
        for tensor in (*inputs, *module.parameters()):
            if isinstance(tensor, nn.Parameter):
                self.read[tensor] = True

    @property
    def share(self) -> float:
        """Share of planned FLOPs; those of ``uncounted`` modules are estimated by weights."""
        weights = [(m, p) for _, m, p in self._weights()]
        read = sum(p.numel() for _, p in weights if p in self.read)
        if not self.planned_flops or not read:  # no FLOPs per weight known: count weights
            total = sum(p.numel() for _, p in weights)
            return read / total if total else 1.0
        missed = sum(p.numel() for m, p in weights if self._is_uncounted(m, p))
        estimated = self.planned_flops * missed / read
        return self.planned_flops / (self.planned_flops + self.recurrent_flops + estimated)

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Names of modules whose weights no planned graph reads, except recurrent layers."""
        return tuple(
            dict.fromkeys(n for n, m, p in self._weights() if self._is_uncounted(m, p))
        )

    def _is_uncounted(self, module: nn.Module, weight: nn.Parameter) -> bool:
        return weight not in self.read and not isinstance(module, _RECURRENT)

    def warn(self, reasons: Sequence[str]) -> None:
        """Warn once of unplanned modules, if they are a large share; ``reasons`` say why."""
        missed = {n: m for n, m, p in self._weights() if p not in self.read}
        if self.said or not reasons or 1 - self.share < _SUBSTANTIAL:
            return
        self.said = True
        if any(isinstance(m, _RECURRENT) for m in missed.values()):
            reasons = [_RECURRENT_REASON]
        guessed = (
            f" (by the weights of {_listed(self.uncounted)}, whose code was not captured)"
            if self.uncounted
            else ""
        )
        warnings.warn(
            f"finecast planned {self.share:.0%} of the FLOPs{guessed}; {_listed([*missed])} "
            f"stay fp32: {'; '.join(reasons)}",
            stacklevel=3,
        )

    def _weights(self) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
        """Each weight matrix once: the name of the module that owns it, the module, it."""
        seen: set[int] = set()
        for root in self.modules:
            for name, module in root.named_modules():
                for own, parameter in module.named_parameters(recurse=False):
                    known = id(parameter) in seen
                    if (
                        parameter.dim() > 1
                        and not known
                        and not isinstance(module, _LOOKED_UP)
                    ):
                        seen.add(id(parameter))
                        yield name or own, module, parameter


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:_NAMED], *(["..."] if len(names) > _NAMED else [])])


def watched(compiled: Callable[..., Any], coverage: Coverage) -> Callable[..., Any]:
    """``compiled``, with recurrent layers excluded from Dynamo, and a warning if due."""
    recurrent = any(isinstance(m, _RECURRENT) for r in coverage.modules for m in r.modules())
    module = isinstance(compiled, nn.Module)
    inner: Callable[..., Any] = compiled.forward if module else compiled

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        if coverage.said and not recurrent:
            return inner(*args, **kwargs)
        before, planned = _stops(), coverage.planned_flops
        with _around_recurrent_layers(wanted=recurrent) as ran:
            result = inner(*args, **kwargs)
        if coverage.planned_flops != planned:
            coverage.recurrent_flops += sum(ran)
        if not coverage.said:
            coverage.warn([*(_stops() - before)])
        return result

    if not module:
        return call
    compiled.forward = call
    return compiled


def _stops() -> Counter[str]:
    """How often each reason has stopped Dynamo's capture so far in this process."""
    kinds: Mapping[str, Mapping[str, int]] = counters
    found = Counter[str]()
    for kind in ("graph_break", "unimplemented"):
        for text, count in kinds.get(kind, {}).items():
            found[_short(text)] += count
    return found


def _short(text: str) -> str:
    """The explanation in Dynamo's message of several lines, or else its first line."""
    lines = [line.strip() for line in text.splitlines()]
    explained = [line for line in lines if line.startswith("Explanation: ")]
    return (explained or lines)[0].removeprefix("Explanation: ").rstrip(".")


@contextmanager
def _around_recurrent_layers(*, wanted: bool) -> Generator[list[float]]:
    """Have the code before and after a recurrent layer compiled, which Dynamo would not do.

    Gives a list to which the FLOPs of each recurrent layer are added as it runs.
    """
    if not wanted or dynamo_config.allow_rnn:
        yield []
        return
    ran: list[float] = []
    token = _RAN.set(ran)
    before = {kind: kind.forward for kind in _RECURRENT}
    try:
        for kind, opaque in _OPAQUE.items():
            setattr(kind, "forward", opaque)  # noqa: B010 - the kinds' types differ
        with dynamo_config.patch(allow_rnn=True):
            yield ran
    finally:
        _RAN.reset(token)
        for kind, forward in before.items():
            setattr(kind, "forward", forward)  # noqa: B010


def _modules_of(function: Callable[..., Any]) -> Iterator[nn.Module]:
    """The modules that ``function`` is, is a method of, or refers to."""
    if isinstance(function, nn.Module):
        yield function
        return
    named: list[Any] = [getattr(function, "__self__", None)]
    if inspect.isfunction(inspect.unwrap(function)):
        found = inspect.getclosurevars(inspect.unwrap(function))
        named += [*found.nonlocals.values(), *found.globals.values()]
    yield from (m for m in named if isinstance(m, nn.Module))
