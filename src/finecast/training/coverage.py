"""How much of a compiled function was planned, and why the rest was not.

Dynamo leaves parts of a function as they are: recurrent layers, code it cannot trace. They run
op by op and in fp32. FLOPs of what is not captured cannot be known; products take the same
number for each element of their weights and position, so weights stand for them.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch.utils.weak import WeakTensorKeyDictionary

# Less than this share unplanned is not worth a word.
_SUBSTANTIAL: Final = 0.1
_NAMED: Final = 4
_RECURRENT: Final = (nn.RNN, nn.LSTM, nn.GRU)
_LOOKED_UP: Final = (nn.Embedding, nn.EmbeddingBag)
_RECURRENT_REASON: Final = (
    "PyTorch's compiler runs recurrent layers as they are (it unrolls them, step by step, "
    "with torch._dynamo.config.allow_rnn = True)"
)
_OPAQUE: Final = {
    kind: torch.compiler.disable(kind.forward, reason="recurrent layers run as they are")
    for kind in _RECURRENT
}


class Coverage:
    """The weights of a function's products, and which of them planned graphs read."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.modules = tuple(_modules_of(function))
        self.read = WeakTensorKeyDictionary()
        self.said = False

    def add(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Note what a graph that is planned reads."""
        for tensor in (*inputs, *module.parameters()):
            if isinstance(tensor, nn.Parameter):
                self.read[tensor] = True

    @property
    def share(self) -> float:
        """Elements of weights in planned graphs over all elements; 1 where there are none."""
        found = [p for _, _, p in self._weights()]
        total = sum(p.numel() for p in found)
        return sum(p.numel() for p in found if p in self.read) / total if total else 1.0

    def warn(self, reasons: Sequence[str]) -> None:
        """Say once what runs unplanned, if it is much and something stopped the compiler."""
        missed = {n: m for n, m, p in self._weights() if p not in self.read}
        if self.said or not reasons or 1 - self.share < _SUBSTANTIAL:
            return
        self.said = True
        if any(isinstance(m, _RECURRENT) for m in missed.values()):
            reasons = [_RECURRENT_REASON]
        names = [*missed][:_NAMED] + (["..."] if len(missed) > _NAMED else [])
        warnings.warn(
            f"finecast planned {self.share:.0%} of the weights; those of {', '.join(names)} "
            f"stay fp32: {'; '.join(reasons)}",
            stacklevel=3,
        )

    def _weights(self) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
        """Each weight once, with the module that holds it and that module's name."""
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


def watched(compiled: Callable[..., Any], coverage: Coverage) -> Callable[..., Any]:
    """``compiled``, which goes around recurrent layers and says what else it missed."""
    recurrent = any(isinstance(m, _RECURRENT) for r in coverage.modules for m in r.modules())
    module = isinstance(compiled, nn.Module)
    inner: Callable[..., Any] = compiled.forward if module else compiled

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        if coverage.said and not recurrent:
            return inner(*args, **kwargs)
        before = _stops()
        with _around_recurrent_layers(wanted=recurrent):
            result = inner(*args, **kwargs)
        if not coverage.said:
            coverage.warn([*(_stops() - before)])
        return result

    if not module:
        return call
    compiled.forward = call
    return compiled


def _stops() -> Counter[str]:
    """What has stopped Dynamo so far in this process, in short."""
    kinds: Mapping[str, Mapping[str, int]] = counters
    found = Counter[str]()
    for kind in ("graph_break", "unimplemented"):
        for text, count in kinds.get(kind, {}).items():
            found[_short(text)] += count
    return found


def _short(text: str) -> str:
    """Dynamo's explanation, of a message that has several lines."""
    lines = [line.strip() for line in text.splitlines()]
    explained = [line for line in lines if line.startswith("Explanation: ")]
    return (explained or lines)[0].removeprefix("Explanation: ").rstrip(".")


@contextmanager
def _around_recurrent_layers(*, wanted: bool) -> Generator[None]:
    """Compile what is before and after a recurrent layer; Dynamo would leave all of it."""
    if not wanted or dynamo_config.allow_rnn:
        yield
        return
    before = {kind: kind.forward for kind in _RECURRENT}
    try:
        for kind, opaque in _OPAQUE.items():
            setattr(kind, "forward", opaque)  # noqa: B010 - the kinds' types differ
        with dynamo_config.patch(allow_rnn=True):
            yield
    finally:
        for kind, forward in before.items():
            setattr(kind, "forward", forward)  # noqa: B010


def _modules_of(function: Callable[..., Any]) -> Iterator[nn.Module]:
    """Modules that ``function`` is, is a method of, or names."""
    if isinstance(function, nn.Module):
        yield function
        return
    named: list[Any] = [getattr(function, "__self__", None)]
    if inspect.isfunction(inspect.unwrap(function)):
        found = inspect.getclosurevars(inspect.unwrap(function))
        named += [*found.nonlocals.values(), *found.globals.values()]
    yield from (m for m in named if isinstance(m, nn.Module))
