"""finecast for PyTorch: ``convert``, ``tune``, ``compile``, ``profile``; ``.pt2`` files."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Unpack

from finecast.errors import EngineError, UsageError, in_python

if importlib.util.find_spec("torch") is None:
    raise EngineError("finecast.torch needs PyTorch", fix="pip install torch onnxscript")

import torch
from torch._C._profiler import (
    _EventType,  # pyright: ignore[reportPrivateUsage] - no public name
)
from torch.export import ExportedProgram

from finecast import api
from finecast.arguments import checked
from finecast.calls import checks
from finecast.engines.torch.rates import wait_for
from finecast.engines.torch.session import Arguments, arguments_of
from finecast.frontends.torch.converted import ConvertedModule
from finecast.keywords import ConvertModuleKeywords, TuneModuleKeywords
from finecast.measure.racing import ANCHOR, Effort, Race
from finecast.measure.timing import Latency
from finecast.native.conversion_notes import NOTHING_CONVERTED
from finecast.native.model import RunOptions
from finecast.native.torch.files import export, load, save
from finecast.native.torch.model import of_module
from finecast.native.torch.subject import TuneOptions
from finecast.native.torch.workload import Evaluate
from finecast.plugin import public_name
from finecast.rules.guests import rule_set_of
from finecast.rules.policy import DEFAULT_POLICY, Policy, Scope
from finecast.tuning.result import Result

if TYPE_CHECKING:
    from finecast_training.backend import Backend, compile  # noqa: A004 - as torch.compile
    from finecast_training.step import TrainingStep
    from finecast_training.step_tuning import tune_step
    from finecast_training.tuned_step import load_step

__all__ = [
    "Backend",
    "Profile",
    "Result",
    "TrainingStep",
    "TuneOptions",
    "activation_bytes",
    "compile",
    "convert",
    "export",
    "load",
    "load_step",
    "peak_bytes",
    "profile",
    "resident_bytes",
    "save",
    "saved_bytes",
    "tune",
    "tune_step",
]


def __getattr__(name: str) -> Any:
    """A name that a plugin gives, such as ``compile``, imported on first use."""
    return public_name(f"finecast.torch.{name}")


@checked(*api.OF_TUNING)
def tune(
    module: torch.nn.Module | ExportedProgram,
    example_inputs: Sequence[Any] | None,
    *,
    evaluate: Evaluate,
    example_kwargs: Mapping[str, Any] | None = None,
    policy: str | Policy = DEFAULT_POLICY,
    options: TuneOptions | None = None,
    **more: Unpack[TuneModuleKeywords],
) -> Result:
    """``finecast.tune`` of a module: the fastest plan for which ``evaluate(module)`` is kept.

    Laws: the result never misses the criterion and, run in the same way on this machine, is
    never worse than fp32 by the objective. Where nothing helps, its ``model`` is the module as
    it was given, and ``why`` says why.

    Args:
        module: The module, or an exported program.
        example_inputs: Positional inputs, on which plans are timed and their errors estimated.
            None or empty for an exported program, which has its own.
        evaluate: Returns the accuracy of a module.
        example_kwargs: Keyword inputs.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy.
        options: How plans are tried.
        more: Other options of ``finecast.tune``: the accuracy to keep (``criterion``,
            ``tolerance``; by default at most 1% less), ``lower_is_better``, ``objective``,
            ``max_trials``, ``baseline`` and the like.

    Raises:
        ModelError: If the module cannot be captured, or its own metric is NaN.
        UserCodeError: If ``evaluate`` fails, or what it returns says nothing of the module:
            no finite number, or one that does not follow from the module's outputs.
    """
    how = options or TuneOptions()
    api.asked(policy=policy, evaluate=evaluate, **more)  # an export takes long
    arguments = arguments_of(module, example_inputs, example_kwargs)
    model = of_module(module, arguments, dynamic_shapes=how.dynamic_shapes)
    model.tuning = how
    return api.tune(model, policy=policy, evaluate=evaluate, **more)


@checked(RunOptions)
def convert(
    module: torch.nn.Module | ExportedProgram,
    example_inputs: Sequence[Any] | None = None,
    policy: str | Policy = DEFAULT_POLICY,
    dynamic_shapes: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    rule_set: str = "finecast",
    calibration: Iterable[Arguments] = (),
    **more: Unpack[ConvertModuleKeywords],
) -> ConvertedModule:
    """Convert a module to mixed precision by one plan over its whole graph.

    Laws: inputs and outputs keep their types; ops that stay fp32 compute as before; ``auto``
    never chooses a format that is slower here; neither the example inputs nor the state of
    ``module`` change, now or when the result runs. The result has tensors of its own, so that
    it stays as it is where ``module`` is trained on. The predicted error of ``auto`` and
    ``like-autocast`` is at most that of ``torch.autocast``: among such plans ``auto`` takes
    the fastest, and ``like-autocast``, with every product low, the one that moves least
    memory. The plan, with every rule's reason, is ``result.finecast_plan``. Outputs on the
    example inputs are what the formats explain (``verify=False`` leaves that unchecked).

    Args:
        module: The module (captured in evaluation mode), or an exported program.
        example_inputs: Positional inputs, on which the plan's errors are estimated. May be
            left out for an exported program, which has its own.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy.
        dynamic_shapes: As ``torch.export.export`` takes them.
        example_kwargs: Keyword inputs.
        rule_set: ``finecast``, or a guest's (``rules/guests.py``), as ``raf``.
        calibration: Positional and keyword inputs of further calls, each as a pair: int8 has
            scales by the ranges of values on these. By default by those on the example inputs.
        more: Other options of ``finecast.convert``: ``user_rules``, ``verify`` and the like.

    Raises:
        ModelError: If the module cannot be captured, or a guest's rules lack an op.
        WrongNumbersError: If no digit of an output is right; names the op.
        UsageError: If the policy cannot be read, a module comes without inputs, or an
            override names no op of the module.
    """
    arguments = arguments_of(module, example_inputs, example_kwargs)
    model = of_module(module, arguments, dynamic_shapes=dynamic_shapes)
    model.rule_set = rule_set_of(rule_set)
    model.calibration = [model.signature.feeds(*_call(one)) for one in calibration]
    done = api.convert(model, policy=policy, **more)
    result: ConvertedModule = done.model
    leaves = Policy.of(policy).scope is Scope.AUTO  # what gains nothing, as it is asked
    for text in done.warnings:
        if leaves and text.startswith(NOTHING_CONVERTED):
            continue
        warnings.warn(in_python(text), stacklevel=3)  # past the check of arguments
    return result


def _call(arguments: object) -> Arguments:
    """The positional and keyword inputs of a call; UsageError for what is no such pair."""
    match arguments:
        case tuple() | list() as args, dict() as kwargs:
            return tuple(args), kwargs
        case _:
            raise UsageError(
                f"a {type(arguments).__name__} is no pair of positional and keyword inputs",
                where="calibration",
                fix="give a pair for each call, as ((x,), {})",
            )


# --------------------- ``profile``: time per call and the peak of the memory that tensors take
#
# Peaks are counted from the allocator's own events (``torch.profiler``'s memory records), so
# that they are those of tensors and not of the process. On CUDA the peak is the allocator's
# own statistic. All leave out memory allocated before the call, except ``resident_bytes``.

_ALLOCATION: Final = _EventType.Allocation
_OF_TORCH: Final = re.compile(r"torch(\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Times of single calls, and the most bytes that a call had allocated at once.

    ``activation_bytes`` is the peak of memory that the call freed again: activations, low
    copies of weights, temporaries; not gradients and optimizer state, which remain. On CUDA,
    PyTorch's profiler does not report tensors that Python frees between ops: they count as
    remaining.
    """

    latency: Latency
    peak_bytes: int
    activation_bytes: int
    resident_bytes: int

    @property
    def ms(self) -> float:
        """Median milliseconds of a call."""
        return 1e3 * self.latency.median_s

    @property
    def mb(self) -> float:
        """Peak of a call plus ``resident_bytes``, in MiB (2**20 bytes)."""
        return (self.peak_bytes + self.resident_bytes) / 2**20


@checks
def profile(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    warmup: int = 5,
    repeats: int = 10,
    min_time_s: float = 0.0,
) -> Profile:
    """Time ``fn(*args)`` and find its peak of tensor memory.

    Args:
        fn: A module, a compiled function, or a whole training step.
        args: Its arguments.
        warmup: Calls before the first that is timed.
        repeats: The least number of timed calls.
        min_time_s: The least time to spend on them, in seconds.
    """
    device = _device(fn, args)

    def call() -> None:
        fn(*args)
        wait_for(device)

    effort = Effort(min_time_s=min_time_s, rounds=repeats, warmup=warmup)
    return Profile(
        latency=Race.of(call, {}, effort).latency(ANCHOR),
        peak_bytes=_cuda_peak(call) if device == "cuda" else _peak(_allocations(call, device)),
        activation_bytes=_peak(a for a in _allocations(call, device) if a.freed is not None),
        resident_bytes=resident_bytes(fn, args),
    )


@checks
def peak_bytes(fn: Callable[..., Any], args: Sequence[Any] = ()) -> int:
    """The most bytes that one call had allocated at once, beyond what was there before."""
    device = _device(fn, args)
    if device == "cuda":
        return _cuda_peak(lambda: fn(*args))
    return _peak(_allocations(lambda: fn(*args), device))


@checks
def activation_bytes(fn: Callable[..., Any], args: Sequence[Any] = ()) -> int:
    """The peak of memory that one call allocated and freed again, in bytes.

    For a forward and backward pass that starts without gradients, this is the peak of memory
    without parameters, gradients and optimizer state.
    """
    events = _allocations(lambda: fn(*args), _device(fn, args))
    return _peak(a for a in events if a.freed is not None)


@checks
def saved_bytes(fn: Callable[..., Any], args: Sequence[Any] = ()) -> int:
    """Bytes that one call allocated and that stay allocated while its result lives.

    For a forward pass these are the result and what is saved for the backward pass.
    """
    held: list[Any] = []
    events = _allocations(lambda: held.append(fn(*args)), _device(fn, args))
    return sum(a.size for a in events if a.freed is None)


@checks
def resident_bytes(fn: object, args: Sequence[Any]) -> int:
    """Bytes of the tensors that ``fn`` holds and of tensor arguments; shared memory once.

    A function holds the modules, optimizers (with their state) and tensors that its code
    names, those of the object that it is a method of, and those of functions that it names.
    """
    storages = [t.untyped_storage() for t in _tensors((fn, tuple(args)), set())]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _tensors(held: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors of ``held``, and of what it refers to; ``seen`` are ids of what was read."""
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, torch.Tensor):
        yield held
        return
    for one in _parts(held):
        yield from _tensors(one, seen)


def _parts(held: object) -> Iterable[object]:
    """What an object consists of or refers to, of the kinds that can hold tensors."""
    match held:
        case torch.nn.Module():
            return (*held.parameters(), *held.buffers())
        case torch.optim.Optimizer():
            return (held.param_groups, *held.state.values())
        case functools.partial():
            return (held.func, held.args, held.keywords)
        case types.MethodType():
            return (
                held.__self__,
                held.__func__,
                *getattr(held.__self__, "__dict__", {}).values(),
            )
        case types.FunctionType():
            return _named_by(inspect.unwrap(held))
        case dict():
            return held.values()
        case list() | tuple():
            return held
        case _:
            return ()


def _named_by(function: Callable[..., Any]) -> Iterator[object]:
    """What the code of a function names; nothing for functions of torch's own."""
    if not isinstance(function, types.FunctionType) or _OF_TORCH.match(function.__module__):
        return
    yield from (function.__defaults__ or ())
    yield from (function.__globals__.get(name) for name in function.__code__.co_names)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # raised for a variable that has no value yet
            yield cell.cell_contents


@dataclass(slots=True, kw_only=True)
class _Allocation:
    """``size`` bytes, with the numbers of the events that made and freed them.

    ``freed`` is None if they were not freed within the call.
    """

    size: int
    made: int
    freed: int | None = None


def _allocations(call: Callable[[], None], device: str) -> list[_Allocation]:
    """The allocations that ``call`` makes on ``device``, in order."""
    # Kineto, the profiler's library, logs to stderr unless this is set before it starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as recorded:
        call()
    results: Any = recorded.profiler.kineto_results  # type: ignore[union-attr]
    waiting, events = list(results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == _ALLOCATION and event.extra_fields.device.type == device:
            events.append(event)
    events.sort(key=lambda event: event.start_time_ns)
    allocations: list[_Allocation] = []
    alive: dict[int, _Allocation] = {}
    for number, event in enumerate(events):
        size, address = int(event.extra_fields.alloc_size), int(event.extra_fields.ptr)
        if size > 0:
            alive[address] = _Allocation(size=size, made=number)
            allocations.append(alive[address])
        elif address in alive:
            alive.pop(address).freed = number
    return allocations


def _peak(allocations: Iterable[_Allocation]) -> int:
    """The most bytes that ``allocations`` take at one time."""
    changes: list[tuple[int, int]] = []
    for allocation in allocations:
        changes.append((allocation.made, allocation.size))
        if allocation.freed is not None:
            changes.append((allocation.freed, -allocation.size))
    return max(accumulate((change for _, change in sorted(changes)), initial=0))


def _cuda_peak(call: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _device(fn: object, args: Sequence[Any]) -> str:
    return next((t.device.type for t in _tensors((tuple(args), fn), set())), "cpu")
