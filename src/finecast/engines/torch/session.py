"""PyTorch modules as sessions: arrays by name in, arrays by name out."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, TensorArgument
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_unflatten

from finecast.engines.base import Array, Feeds, Session, TensorSpec, ordered_feeds
from finecast.engines.base import dtype_label as dtype_label_of
from finecast.errors import EngineError, ModelError, UsageError, first_line
from finecast.frontends.native_model import OFFSET
from finecast.frontends.torch.aten import DTYPES, dtype_label
from finecast.frontends.torch.capture import evaluating, user_ports
from finecast.frontends.torch.draws import draw_numbers, draws, fixed_draws
from finecast.frontends.torch.runnable import Isolated, RunnableModule
from finecast.naming import kind_of
from finecast.numbers.formats import Format
from finecast.planning.points import SWITCH

_LOW: Final = {Format.BF16.label: Format.BF16}
_FURTHER: Final = {SWITCH: "bool", OFFSET: "int64"}
"""Types of the inputs that copies may have besides those of their program."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSignature:
    """The flattened arguments and results of a program.

    ``inputs`` are the tensors among the arguments, in order, and ``devices`` where they are;
    ``constants`` the other arguments with their positions. Results that are no tensors are
    None in ``outputs``.
    """

    inputs: tuple[TensorSpec, ...]
    devices: tuple[torch.device, ...]
    constants: tuple[tuple[int, Any], ...]
    outputs: tuple[TensorSpec | None, ...]
    program: ExportedProgram

    @classmethod
    def of(cls, program: ExportedProgram) -> ProgramSignature:
        """Read a program's signature.

        Raises:
            ModelError: If an input is neither a tensor nor a constant.
        """
        fakes = {n.name: n.meta.get("val") for n in program.graph.nodes}
        inputs: list[TensorSpec] = []
        devices: list[torch.device] = []
        constants: list[tuple[int, Any]] = []
        arguments, results = user_ports(program)
        for number, arg in enumerate(arguments):
            if isinstance(arg, TensorArgument):
                inputs.append(_spec(arg.name, fakes[arg.name]))
                devices.append(fakes[arg.name].device)
            elif isinstance(arg, ConstantArgument):
                constants.append((number, arg.value))
            else:
                raise ModelError(
                    f"input {arg.name!r} is a number that varies",
                    fix="pass it as a tensor, or export with a fixed value",
                )
        return cls(
            inputs=tuple(inputs),
            devices=tuple(devices),
            constants=tuple(constants),
            outputs=tuple(
                _spec(a.name, fakes[a.name]) if isinstance(a, TensorArgument) else None
                for a in results
            ),
            program=program,
        )

    @property
    def device(self) -> torch.device:
        """Where the program computes: that of its inputs, the CPU if all are there or none."""
        return next((d for d in self.devices if d.type != "cpu"), torch.device("cpu"))

    def unflattened(self, leaves: Sequence[Any]) -> Arguments:
        """Positional and keyword arguments of flat ones."""
        spec = self.program.call_spec.in_spec
        assert spec is not None
        args, kwargs = tree_unflatten(list(leaves), spec)
        return tuple(args), dict(kwargs)

    def leaves(self, feeds: Feeds) -> list[Any]:
        """Arguments that carry ``feeds``, flat, in the order of the program's placeholders."""
        # Copies: torch takes no read-only arrays, and a program may write to its inputs.
        if isinstance(feeds, ExampleFeeds):
            return [x.detach().clone() if torch.is_tensor(x) else x for x in feeds.leaves]
        arrays = ordered_feeds(feeds, self.inputs)
        placed = zip(arrays, self.devices, strict=True)
        leaves: list[Any] = [_tensor(array).to(device) for array, device in placed]
        for number, value in self.constants:
            leaves.insert(number, value)
        return leaves

    def feeds(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExampleFeeds:
        """The feeds of arguments."""
        return ExampleFeeds(tree_leaves((tuple(args), dict(kwargs))), self.inputs)

    def results(self, outputs: Mapping[str, Array]) -> Any:
        """The program's results, as it returns them, of outputs by name."""
        spec = self.program.call_spec.out_spec
        assert spec is not None
        fakes = {n.name: n.meta.get("val") for n in self.program.graph.nodes}
        leaves: list[Any] = []
        for result in user_ports(self.program)[1]:
            if isinstance(result, TensorArgument):
                fake = fakes[result.name]
                leaves.append(_tensor(outputs[result.name]).to(fake.device, fake.dtype))
            else:
                leaves.append(getattr(result, "value", None))
        return tree_unflatten(leaves, spec)


def _tensor(array: Array) -> torch.Tensor:
    """An array as a tensor of its own; torch knows none of ml_dtypes' types."""
    label = dtype_label_of(array.dtype)
    if label in _LOW:
        return torch.from_numpy(array.astype(np.float32)).to(DTYPES[_LOW[label]])
    return torch.from_numpy(np.array(array, order="C"))


def _spec(name: str, fake: Any) -> TensorSpec:
    shape = tuple(d if isinstance(d, int) else str(d) for d in fake.shape)
    return TensorSpec(name=name, dtype=dtype_label(fake.dtype), shape=shape)


class ExampleFeeds(dict[str, Array]):
    """The feeds of example arguments, which keep them as they are.

    As a mapping it has arrays of the dense tensors; some tensors, such as sparse ones, have no
    array. A session of PyTorch runs on clones of the tensors themselves.
    """

    def __init__(self, leaves: Sequence[Any], inputs: Sequence[TensorSpec]) -> None:
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        dense = (
            (spec.name, output_array(x))
            for spec, x in zip(inputs, tensors, strict=True)
            if x.layout is torch.strided
        )
        super().__init__(dense)
        self.leaves = tuple(leaves)


@dataclass(eq=False, kw_only=True)
class ModuleSession(Session):
    """A module, or a copy of one; what a run of a module writes to buffers is undone."""

    runnable: RunnableModule

    def __post_init__(self) -> None:
        """Ports are the program's tensors, in order, and those that a copy has besides."""
        model = self.runnable
        self.signature = ProgramSignature.of(model.program)
        further = (TensorSpec(name=n, dtype=_FURTHER[n], shape=None) for n in model.further)
        self.inputs = (*self.signature.inputs, *further)
        output_specs = [spec for spec in self.signature.outputs if spec is not None]
        named = [TensorSpec(name=n, dtype="fp32", shape=None) for n in model.outputs or ()]
        self.outputs = output_specs if model.outputs is None else named
        self.call = Isolated(model.module).leaves if model.is_copy else self._call
        graph = model.module.graph if model.is_copy else model.program.graph
        self.draws = draw_numbers(graph) if draws(model.program) else None

    @property
    def module(self) -> Any:
        """What is called."""
        return self.runnable.module

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """As ``Session.run``."""
        own = {name: array for name, array in feeds.items() if name not in _FURTHER}
        leaves = self.signature.leaves(feeds if isinstance(feeds, ExampleFeeds) else own)
        place = self.signature.device
        leaves += [_tensor(feeds[name]).to(place) for name in self.runnable.further]
        with torch.no_grad(), as_engine_error(), fixed_draws(self.draws):
            output_leaves = tree_leaves(self.call(leaves))
        tensors = [x for x in output_leaves if isinstance(x, torch.Tensor)]
        specs = zip(self.outputs, tensors, strict=True)
        return {spec.name: output_array(x) for spec, x in specs}

    @property
    def settings(self) -> Mapping[str, str]:
        """What PyTorch has been told in this process."""
        gpu = {"cudnn_allow_tf32": str(torch.backends.cudnn.allow_tf32)}
        return {
            **(gpu if self.signature.device.type == "cuda" else {}),
            "threads": str(torch.get_num_threads()),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "mkldnn": str(torch.backends.mkldnn.enabled),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }

    def running(self, deployed: object) -> Session:
        """A session that calls a module of the caller's as it is, such as a compiled one."""
        if not isinstance(deployed, torch.nn.Module):
            return Session.running(self, deployed)
        session = ModuleSession(runnable=replace(self.runnable, module=deployed))
        session.call = session._called
        return session

    def _call(self, leaves: Sequence[Any]) -> Any:
        with evaluating(self.module):
            return self._called(leaves)

    def _called(self, leaves: Sequence[Any]) -> Any:
        args, kwargs = self.signature.unflattened(leaves)
        with unwritten([self.module]):
            return self.module(*args, **kwargs)


@contextmanager
def as_engine_error() -> Generator[None]:
    """Inside, what PyTorch raises for a model or its inputs is an EngineError."""
    try:
        yield
    except (RuntimeError, NotImplementedError, IndexError, ValueError) as error:
        raise EngineError(f"PyTorch fails: {first_line(error)}") from error


@contextmanager
def unwritten(modules: Iterable[torch.nn.Module]) -> Generator[None]:
    """Restore the modules' buffers afterwards if they were written to.

    Sparse ones are not looked at: no op writes into them.
    """
    all_buffers = (b for module in modules for b in module.buffers())
    buffers = {id(b): b for b in all_buffers if b.layout is torch.strided}
    before = [(b, b.detach().clone()) for b in buffers.values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, was in before:
                # Batch norms do not count their writes as new versions.
                if not torch.equal(buffer, was):
                    buffer.copy_(was)


def output_array(leaf: torch.Tensor) -> Array:
    """A result as an array; floats of other types than fp64 in fp32."""
    plain = leaf.detach().cpu()
    low = plain.is_floating_point() and plain.dtype is not torch.float64
    array: Array = (plain.float() if low else plain).numpy()
    return array


def runnable(program: ExportedProgram) -> GraphModule:
    """The program as a module on which ``eval`` and ``train`` can be called."""
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    for name in ("train", "eval"):
        # Instance attributes that torch.export sets, which raise when called.
        module.__dict__.pop(name, None)
    return module


def arguments_of(
    module: object,
    args: object,
    kwargs: Mapping[str, Any] | None,
) -> Arguments:
    """The example arguments of a module or program, checked.

    For a program without arguments its own example inputs; keyword arguments in its order.

    Raises:
        UsageError: If ``module`` is neither, ``args`` are not a sequence, or ``kwargs`` do not
            have the names of the program's keyword inputs; or inside of ``torch.autocast``.
        ModelError: If a program carries no example inputs.
    """
    if not isinstance(module, torch.nn.Module | ExportedProgram):
        raise UsageError(
            f"{kind_of(module)} is no module and no exported program",
            fix="give an nn.Module whose forward calls it, or a program, as"
            " finecast.torch.load(path) of a .pt2 file",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise UsageError(
            f"{kind_of(module)} is TorchScript, which torch.export does not capture",
            fix="give the module that it was made of, or a program by torch.export.export",
        )
    check_no_autocast()
    if isinstance(module, ExportedProgram) and not args and not kwargs:
        return examples(module)
    if args is None:
        raise UsageError("a module needs example inputs", fix="give example_inputs")
    if not isinstance(args, tuple | list):
        raise UsageError(
            f"example_inputs is {kind_of(args)}",
            fix="give the positional inputs as a tuple, as (x,)",
        )
    keywords = dict(kwargs or {})
    if isinstance(module, ExportedProgram):
        keywords = _in_program_order(module, keywords)
    return tuple(args), keywords


def check_no_autocast(
    fix: str = "convert outside of it, and run the converted module outside, too",
) -> None:
    """Raise UsageError inside of ``torch.autocast``: a capture would hold its casts."""
    active = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    if active:
        raise UsageError(
            f"torch.autocast({active[0]!r}) is on: it casts ops by itself, and the plan would"
            " be one for what it leaves",
            fix=fix,
        )


def _in_program_order(program: ExportedProgram, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``kwargs`` in the order of the program's placeholders, whatever that of the call."""
    spec = program.call_spec.in_spec
    assert spec is not None
    names: list[str] = spec.child(1).context
    if set(names) != set(kwargs):
        raise UsageError(
            f"the program's keyword inputs are {', '.join(names) or 'none'},"
            f" not {', '.join(kwargs) or 'none'}",
            fix="give example_kwargs with these names",
        )
    return {name: kwargs[name] for name in names}


def examples(program: ExportedProgram) -> Arguments:
    """The arguments that the program was exported with.

    Raises:
        ModelError: If it has none.
    """
    example_inputs = program.example_inputs
    if example_inputs is None:
        raise ModelError(
            "the program has no example inputs", fix="save it with torch.export.save"
        )
    return tuple(example_inputs[0]), dict(example_inputs[1])
