"""Captures an ``nn.Module`` as a functional FX graph of ATen ops and as a neutral graph."""

from __future__ import annotations

import copy
import logging
import re
import sys
import threading
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any, Final

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from finecast.errors import ModelError, UsageError, first_line
from finecast.frontends.torch.draws import number_draws
from finecast.frontends.torch.expand import BIASES, expand_ops
from finecast.frontends.torch.reader import (
    FxBinding,
    attribute,
    read,
    tensors_digest,
    told_apart,
    written,
)
from finecast.frontends.torch.restating import (
    fold_batch_norms,
    fold_constants,
    read_whole_memory,
    state_linear_layers,
)
from finecast.graph import Graph
from finecast.naming import kind_of
from finecast.rules.override import names_biases

_OWN_WEIGHTS: Final = (
    r"The tensor attributes? (self\.(\w+\.)*_flat_weights\[\d+\](, )?)+ (was|were) assigned"
)
_LOGS: Final = ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A module as a graph.

    Attributes:
        program: The module as it was exported.
        module: The same as an FX graph, prepared for planning; it shares the caller's
            parameters, which must not change.
        graph: The neutral graph of ``module``.
        binding: What the ids of ``graph`` stand for.
    """

    program: ExportedProgram
    module: GraphModule
    graph: Graph
    binding: FxBinding


def capture(
    module: torch.nn.Module | ExportedProgram,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    fold: bool = True,
) -> Captured:
    """Export ``module`` in evaluation mode; fused ops (attention, norms) are not decomposed.

    Args:
        module: The module, or a program that was exported already: the next three arguments
            are not used then.
        args: Example positional inputs.
        kwargs: Example keyword inputs.
        dynamic_shapes: As ``torch.export.export`` takes them.
        fold: Fold batch norms into the convolutions before them, compute what ops give of
            constants alone, and state products with constant matrices as linear layers. Where
            an override is for additions of biases, products leave these to ops of their own.

    Raises:
        ModelError: If ``torch.export`` cannot capture the module; says why.
        UsageError: If the module has no data, or tensors that stand for others.
    """
    program = exported(module, args, kwargs, dynamic_shapes=dynamic_shapes)
    _check_plain(program)
    with quiet(), told_apart(program.graph_module):
        unlifted = program.run_decompositions({}).module(check_guards=False)
    assert isinstance(unlifted, GraphModule)
    _check_data(unlifted)
    _drop_assertions(unlifted)
    if fold:
        fold_batch_norms(unlifted)
        fold_constants(unlifted)
        state_linear_layers(unlifted)
        if names_biases():
            expand_ops(unlifted, BIASES)
    read_whole_memory(unlifted)
    number_draws(unlifted.graph)
    # The numbers as they came: those of folded weights depend on the machine.
    weights = tensors_digest({**program.state_dict, **program.constants})
    graph, binding = read(unlifted, **port_names(program), weights=weights)
    return Captured(program=program, module=unlifted, graph=graph, binding=binding)


def user_ports(program: ExportedProgram) -> tuple[list[Any], list[Any]]:
    """The arguments and results of a program as its signature states them, without state."""
    of = program.graph_signature
    taken = [s.arg for s in of.input_specs if s.kind is InputKind.USER_INPUT]
    given = [s.arg for s in of.output_specs if s.kind is OutputKind.USER_OUTPUT]
    return taken, given


def port_names(program: ExportedProgram) -> dict[str, list[str]]:
    """The names of the program's arguments and results, by which sessions know them."""
    taken, given = user_ports(program)
    return {"inputs": [str(a.name) for a in taken], "outputs": [str(a.name) for a in given]}


def shared_copy(original: GraphModule) -> GraphModule:
    """A copy of the module; tensors are shared, but for those that the graph writes to."""
    paths = {str(n.target) for n in written(original) if n.op == "get_attr"}
    copied = {id(attribute(original, path)) for path in paths}
    # deepcopy takes tensors in its memo for copied already, and so shares them.
    tensors = (*original.parameters(), *original.buffers())
    memo = {id(t): t for t in tensors if id(t) not in copied}
    with quiet():
        module = copy.deepcopy(original, memo)
    for old, new in zip(original.graph.nodes, module.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    return module


def _check_plain(program: ExportedProgram) -> None:
    """Raise UsageError if a tensor is several, as a tool that quantizes or shards makes it."""
    for name, tensor in {**program.state_dict, **program.constants}.items():
        if is_traceable_wrapper_subclass(tensor):
            raise UsageError(
                f"{name!r} is {kind_of(tensor)}, which stands for other tensors:"
                " its numbers cannot be planned",
                fix="give the module as it was before it was quantized or sharded",
            )


def _check_data(module: GraphModule) -> None:
    """Raise UsageError if a parameter or buffer is on the meta device, without numbers."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise UsageError(
            f"{empty[0]!r} is on the meta device, and has no numbers to plan by",
            fix="load the weights first: module.to_empty(device='cpu'), then load_state_dict",
        )


def _drop_assertions(module: GraphModule) -> None:
    """Remove assertions of the types of values, which a plan changes."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)
    module.recompile()


def exported(
    module: torch.nn.Module | ExportedProgram,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """``module`` exported in evaluation mode; a program is itself.

    Raises:
        ModelError: If ``torch.export`` cannot capture the module; says why.
    """
    if isinstance(module, ExportedProgram):
        return module
    try:
        with quiet(), evaluating(module), torch.no_grad(), without_partial_graph():
            return torch.export.export(
                module, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes
            )
    except Exception as error:
        raise not_captured(error, type(module).__name__) from error


@contextmanager
def evaluating(module: torch.nn.Module) -> Generator[None]:
    """Evaluation mode inside, each submodule's own mode after."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for one, training in modes:
            one.training = training


@contextmanager
def _raised_alone() -> Generator[None]:
    """Without what torch logs of an op that fails, before it raises the same."""
    logs = [logging.getLogger(f"torch.{name}") for name in _LOGS]
    before = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        yield
    finally:
        for log, disabled in zip(logs, before, strict=True):
            log.disabled = disabled


_ONE_THREAD: Final = threading.RLock()
"""Held where ``torch.export`` runs, which has state of the process, as Python's filters of
warnings are."""


@contextmanager
def quiet() -> Generator[None]:
    """Without torch's warnings about its own code, and its log of what it then raises.

    One thread at a time is inside.
    """
    with _ONE_THREAD, warnings.catch_warnings(), _raised_alone():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        # Attributes that a forward assigns are worth a warning; lists of a recurrent layer's
        # own weights, in whose place torch.export puts others, are not.
        warnings.filterwarnings("ignore", message=_OWN_WEIGHTS, category=UserWarning)
        yield


_FIX: Final = "make torch.export.export(module, example_inputs) work first"
_FIXES: Final = (
    (
        "not a known type",
        (
            "give tensors in tuples and dicts, register the class"
            " (torch.export.register_dataclass), or leave it out: transformers' caches by"
            " use_cache=False"
        ),
    ),
    (
        "data-dependent expression",
        "write what depends on values by torch.where or torch.cond",
    ),
)
"""Parts of messages, and what to do."""
# Advice for those who work on torch.
_ASIDES: Final = re.compile(
    r" *(For more information, run with TORCH_LOGS=\S+|If you don't need to register.*"
    r"|(For more information about this error, )?[Ss]ee:? https?:\S+( for .*?\.(?= |$))?)"
)
_SUGGESTED: Final = re.compile(r"Suggested fixes:\n((?:  .*\n?)+)")
_PLACE: Final = re.compile(r'The following call raised this error:\n  File "(.+)", line (\d+)')


def not_captured(error: Exception, module: str) -> ModelError:
    """The error for a module, by name, on which ``torch.export`` raised ``error``."""
    text = str(error).strip()
    first = _ASIDES.sub("", first_line(error)).strip()
    place = _PLACE.search(text)
    where = f"{module}, {place[1]}:{place[2]}" if place else module
    fix = next((fix for part, fix in _FIXES if part in text), _FIX)
    suggested = _SUGGESTED.search(text)
    if suggested:
        fix = "in dynamic_shapes, " + ", ".join(suggested[1].split("\n")).strip(", ")
        fix = re.sub(r"\s+", " ", fix)
    return ModelError(
        f"torch.export cannot capture the module: {type(error).__name__}: {first}",
        where=where,
        fix=fix,
    )


@contextmanager
def without_partial_graph() -> Generator[None]:
    """Without the graph so far, which ``torch.export`` prints before it raises an error."""
    written = StringIO()
    graph = ""
    try:
        with redirect_stderr(written):
            yield
    except Exception as error:
        graph = str(getattr(error, "partial_fx_graph", ""))
        raise
    finally:
        text = written.getvalue()
        sys.stderr.write(text.replace(f"{graph}\n", "") if graph else text)
