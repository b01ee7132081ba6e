"""A training step as a module of its loss and gradients: every verb takes it like a model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, cast, final

import torch
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch.func import functional_call
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from finecast.calls import checks
from finecast.errors import UsageError

Loss = Callable[..., torch.Tensor]
"""Gets the module and a batch, and gives one number: ``lambda net, x, y: ...``."""

_LOSS: Final = "loss"
_GRADIENT: Final = "grad_{}"
_OWN_FRAME: Final = re.compile(rf'\s*File "{re.escape(__file__)}", line \d+, in .*\n?.*')


@checks
@final
class TrainingStep(torch.nn.Module):
    """The loss of a module on a batch, and its gradients by the module's parameters.

    Laws: it gives a dict, ``loss`` first, then ``grad_NAME`` for each parameter ``NAME`` that
    is trained, as ``loss.backward()`` would make it. It updates nothing: neither parameters
    nor running statistics. Batches have the sizes of the one that it is made with. An op of
    the backward pass has the line of code of the forward op that it is the gradient of; what
    the loss computes outside of modules has that of the loss.

    Args:
        module: The module, in the mode in which it is trained; dropout draws anew in each
            call, and is best switched off.
        loss: The loss of a batch.
        batch: An example of the batch: what ``loss`` gets after the module.

    Raises:
        UsageError: If the loss is not one number that depends on a parameter.
    """

    def __init__(self, module: torch.nn.Module, loss: Loss, batch: Sequence[Any]) -> None:
        super().__init__()
        self._loss = LossOf(module, loss)
        self._trained = [n for n, p in self._loss.named_parameters() if p.requires_grad]
        self._graph = _traced(self._loss, self._trained, batch)

    def forward(self, *batch: Any) -> dict[str, torch.Tensor]:
        """The loss and the gradients on a batch."""
        with preserve_node_meta():  # keeps the lines of code
            loss, *gradients = Interpreter(self._graph).run(_state(self._loss), *batch)
        names = (n.removeprefix(LossOf.PREFIX) for n in self._trained)
        return {_LOSS: loss} | {
            _GRADIENT.format(name): gradient
            for name, gradient in zip(names, gradients, strict=True)
        }


class LossOf(torch.nn.Module):
    """A module whose result is the loss of another."""

    PREFIX: Final = "module."

    def __init__(self, module: torch.nn.Module, loss: Loss) -> None:
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self, *batch: Any) -> torch.Tensor:
        """The loss of a batch."""
        return self.loss(self.module, *batch)


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _traced(module: LossOf, trained: Sequence[str], batch: Sequence[Any]) -> GraphModule:
    """The graph of the forward and the backward pass, in ops of ATen."""

    def run(state: dict[str, torch.Tensor], *batch: Any) -> tuple[torch.Tensor, ...]:
        # Statistics that are updated in place are those of a copy.
        own = {name: tensor.detach().clone() for name, tensor in state.items()}
        leaves = [own[n].requires_grad_() for n in trained]
        loss = functional_call(module, own, batch)
        if loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(
                f"the loss has the shape {tuple(loss.shape)}, and"
                f" {'is' if loss.requires_grad else 'is not'} computed from parameters",
                where="loss",
                fix="return one number that depends on a parameter that is trained",
            )
        setup_stacktrace_preservation_hooks([loss.grad_fn])  # numbers the ops of gradients
        untyped_gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        optional_gradients = cast("tuple[torch.Tensor | None, ...]", untyped_gradients)
        pairs = zip(optional_gradients, leaves, strict=True)
        gradients = (torch.zeros_like(leaf) if one is None else one for one, leaf in pairs)
        return loss.detach(), *gradients

    with warnings.catch_warnings(), preserve_node_meta():
        warnings.simplefilter("ignore")  # PyTorch warns of the mode that notes lines of code
        with torch.autograd.detect_anomaly(check_nan=False):
            graph = make_fx(run, record_stack_traces=True)(_state(module), *batch)
    _trace_back(graph, module.loss)
    return graph


def _trace_back(graph: GraphModule, loss: Loss) -> None:
    """Give every op a line of the user's code.

    PyTorch numbers each op of the forward pass, and the ops of its gradient likewise.
    """
    code = getattr(loss, "__code__", None)
    at = (code.co_filename, code.co_firstlineno, code.co_name) if code else ("", 0, "loss")
    whole = 'File "{}", line {}, in {}'.format(*at)
    frames_by_number: dict[int, str] = {}
    for node in graph.graph.nodes:
        frames = _OWN_FRAME.sub("", node.stack_trace or "").strip()
        number = node.meta.get("seq_nr", -1)
        node.stack_trace = frames_by_number.setdefault(number, frames) or whole
