"""A training step as a module of its loss and gradients: every verb takes it like a model."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast, final

import torch
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch.func import functional_call
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.nn.parameter import is_lazy

from finecast.calls import checks
from finecast.engines.torch import check_no_autocast
from finecast.errors import FinecastError, UsageError, UserCodeError, first_line
from finecast.naming import kind_of

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
        UsageError: If the step cannot be run: the loss is not one number that depends on a
            parameter, or gradients are off.
    """

    def __init__(self, module: torch.nn.Module, loss: Loss, batch: Sequence[Any]) -> None:
        super().__init__()
        check_trainable(module)
        check_arity(loss, batch)
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


def check_loss(loss: Any) -> None:
    """Raise UsageError unless a loss is one real number that depends on a parameter."""
    if isinstance(loss, torch.Tensor):
        depends = "depends" if loss.requires_grad else "does not depend"
        kind = "a complex tensor" if loss.is_complex() else "a tensor"
        text = f"{kind} of shape {tuple(loss.shape)}, which {depends} on parameters"
        if loss.numel() == 1 and loss.requires_grad and not loss.is_complex():
            return
    else:
        text = kind_of(loss)
    raise UsageError(
        f"the loss is {text}",
        where="loss",
        fix="return one number that depends on a parameter that is trained, as"
        " lambda net, x, y: cross_entropy(net(x), y)",
    )


def check_arity(loss: Loss, batch: Sequence[Any]) -> None:
    """Raise UsageError if a loss cannot be called with a module and this batch."""
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # functions written in C may have none
        return
    try:
        signature.bind(None, *batch)
    except TypeError as error:
        raise UsageError(
            f"the loss takes {signature}, and is called with the module and a batch of"
            f" {len(batch)}: {error}",
            where="loss",
            fix="give a function of the module and all parts of a batch, as"
            " lambda net, x, y: cross_entropy(net(x), y) for batches (x, y)",
        ) from error


def check_trainable(module: torch.nn.Module) -> None:
    """Raise UsageError where no gradients in fp32 can be computed.

    This is so under ``torch.autocast``, which would cast the fp32 that plans are compared
    with, where gradients are off, and for modules whose parameters have no size yet.
    """
    check_no_autocast(fix="leave its block for this call: autocast is compared by itself")
    if not torch.is_grad_enabled():
        inference = torch.is_inference_mode_enabled()
        mode = "inference_mode" if inference else "no_grad"
        raise UsageError(
            f"torch.{mode}() is on: nothing has a gradient there",
            fix=f"leave its block, or call within torch.{mode}(False)"
            if inference
            else "leave its block, or call within torch.enable_grad()",
        )
    named = (*module.named_parameters(), *module.named_buffers())
    lazy = next((name for name, tensor in named if is_lazy(tensor)), None)
    if lazy is not None:
        raise UsageError(
            f"{lazy!r} has no size yet: the module is lazy",
            where="model",
            fix="call the module on a batch first, then make its optimizer",
        )


@contextmanager
def users_code(name: str) -> Generator[None]:
    """A block that runs a user's function; what it raises is an error with that name.

    Raises:
        UserCodeError: With the words of the function's own error.
    """
    try:
        yield
    except FinecastError:
        raise
    except Exception as error:
        raise UserCodeError(
            f"the {name} raised {type(error).__name__}: {first_line(error)}",
            where=name,
            fix=f"make the {name} work without finecast first, on the same batches",
        ) from error


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _traced(module: LossOf, trained: Sequence[str], batch: Sequence[Any]) -> GraphModule:
    """The graph of the forward and the backward pass, in ops of ATen."""

    def run(state: dict[str, torch.Tensor], *batch: Any) -> tuple[torch.Tensor, ...]:
        # Statistics that are updated in place are those of a copy.
        own = {name: tensor.detach().clone() for name, tensor in state.items()}
        leaves = [own[n].requires_grad_() for n in trained]
        with users_code("loss"):
            loss = functional_call(module, own, batch)
        check_loss(loss)
        setup_stacktrace_preservation_hooks([loss.grad_fn])  # numbers the ops of gradients
        untyped_gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        optional_gradients = cast("tuple[torch.Tensor | None, ...]", untyped_gradients)
        pairs = zip(optional_gradients, leaves, strict=True)
        gradients = (
            torch.zeros_like(leaf) if gradient is None else gradient
            for gradient, leaf in pairs
        )
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
