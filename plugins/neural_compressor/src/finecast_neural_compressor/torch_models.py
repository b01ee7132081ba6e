"""PyTorch's modules as ``fit`` takes and returns them.

A module with example inputs is planned as a whole graph, by ``finecast.torch``. Without them
it is converted module by module: each that the matmul engine runs gets low parameters and a
cast on either side.
"""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, SupportsIndex

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.utils._pytree import tree_leaves, tree_map

import finecast.torch as finecast_torch
from finecast import Format, Plan, Policy, Scope
from finecast.engines import Feeds, Speed, speed_of
from finecast.engines.torch import Arguments, ProgramSignature, TorchEngine, examples, runnable
from finecast.errors import ModelError, UsageError, first_line
from finecast.files import write_bytes
from finecast.frontends import torch as frontend
from finecast.frontends.torch import DTYPES, check_types_stay, evaluating, quiet
from finecast.graph import Graph
from finecast.native import Subject
from finecast.native.torch import TorchModel, device_of, of_module
from finecast.rules import low_format
from finecast_neural_compressor.given_model import (
    GivenModel,
    Rules,
    Settings,
    low_ops,
    products_in,
)
from finecast_neural_compressor.op_dicts import OpRule

STATE: Final = "best_model.pt"
PROGRAM: Final = "best_model.pt2"
SETTINGS: Final = "best_configure.json"
PLAN: Final = "plan.json"
_VERSION: Final = 1
CONVERTED: Final = (
    *(nn.Linear, nn.Bilinear, nn.MultiheadAttention),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell),
)
"""Classes of modules that are converted where there is no graph."""
# So many positional arguments are data that a module computes on; those after them (masks) are
# only compared or added.
_DATA_ARGUMENTS: Final = 3
_DATA_NAMES: Final = frozenset({"query", "key", "value", "input"})


@dataclass(kw_only=True)
class TorchGiven(GivenModel):
    """A module; ``program`` is its whole graph, None if it is converted module by module."""

    module: nn.Module
    program: ExportedProgram | None
    by_modules: bool = True

    def __post_init__(self) -> None:
        """Name the modules; the whole has no name, and is one where it is a layer."""
        self._types = convertible(self.module)
        named = self.module.named_modules(remove_duplicate=False)
        self.known = {n: type(one).__name__ for n, one in named if n or n in self._types}

    @property
    def native(self) -> nn.Module:
        """The module as it was given."""
        return self.module

    @classmethod
    def of(
        cls, model: nn.Module, settings: Settings, batches: Iterable[Any] | None
    ) -> TorchGiven:
        """Read ``model``; example inputs come from the settings or the first batch.

        Raises:
            UsageError: If a setting does not apply to modules.
        """
        _check(model, settings)
        example = settings.example_inputs
        if example is None and batches is not None:
            example = next(iter(batches), (None,))[0]
        program = None if example is None else _program(model, example)
        return cls(module=model, program=program)

    def convertible(self, low: Format) -> Mapping[str, str]:
        """The modules that can be converted."""
        del low
        return self._types

    @property
    def _arguments(self) -> Arguments:
        return ((), {}) if self.program is None else examples(self.program)

    def speed(self, low: Format) -> Speed:
        """By timed products."""
        device = device_of(self.module, self._arguments[0])
        return speed_of(TorchEngine(device=device.upper()), low)

    def lowered(self, low: Format, kept: frozenset[str]) -> TorchResult:
        """By a plan of the whole graph if there is one, else module by module."""
        if self.program is None:
            chosen = {name: kind for name, kind in self._types.items() if name not in kept}
            return by_modules(self.module, chosen, low)
        rule = OpRule(dict.fromkeys(kept, frozenset({Format.FP32})), modules=True)
        rules: Rules = {"conf": rule} if kept else {}
        conversion = self._converted(Policy(formats=(low,)), rules)
        if conversion.products:
            return conversion
        # No product gains on these inputs, and the user asked for a conversion.
        return self._converted(Policy(scope=Scope.MATMULT, formats=(low,)), rules)

    def graph(self, policy: Policy) -> Graph:
        """The graph of the program."""
        del policy
        return self._opened.prepare(Policy()).graph

    @cached_property
    def _opened(self) -> TorchModel:
        if self.program is None:
            raise UsageError(
                "int8 needs the graph of the module, and it could not be captured",
                where=type(self.module).__name__,
                fix="see what torch.export.export says of it",
            )
        return of_module(self.program, examples(self.program))

    def feeds(self, inputs: Any) -> Feeds:
        """The tensors among a batch's inputs by the program's names."""
        return self._opened.signature.feeds(*arguments(inputs))

    def quantized(
        self, policy: Policy, rules: Rules, calibration: Sequence[Any]
    ) -> TorchResult:
        """By ``finecast.torch.convert``, calibrated on all batches."""
        assert self._opened
        return self._converted(policy, rules, [arguments(inputs) for inputs in calibration])

    def _converted(
        self, policy: Policy, rules: Rules, calibration: Sequence[Arguments] = ()
    ) -> TorchResult:
        assert self.program is not None
        low = finecast_torch.convert(
            self.program, policy=policy, user_rules=rules, calibration=calibration
        )
        return self.result(low, low.finecast_plan)

    def subject(self) -> Subject:
        """The program, compiled if there is a compiler."""
        return self._opened.subject(None, None)

    def result(self, model: nn.Module, plan: Plan | None) -> TorchResult:
        """The result for the module of a plan."""
        return TorchResult(model, low=low_ops(plan), program=self.program)


def _check(model: nn.Module, settings: Settings) -> None:
    if settings.ports:
        raise UsageError(
            "inputs and outputs name nodes of a graph, which a module does not have",
            fix="leave them out",
        )
    if settings.backend != "default":
        raise UsageError(
            f"backend {settings.backend!r} does not run PyTorch modules",
            fix='use backend="default"',
        )
    if settings.device in {"npu", "xpu"}:
        raise UsageError(
            f"device {settings.device!r} is not supported for PyTorch modules",
            fix='use device="cpu" or "gpu"',
        )
    if settings.device == "gpu" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device", fix='use device="cpu"')
    if settings.device == "gpu" and device_of(model, ()) != "cuda":
        raise UsageError('the model is not on device "gpu"', fix="give model.cuda()")


def arguments(example: Any) -> Arguments:
    """Arguments to call a model with: a mapping by keyword, a tuple or list in order."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


def _program(model: nn.Module, example: Any) -> ExportedProgram | None:
    try:
        return export_freely(model, *arguments(example))
    except ModelError as error:
        warnings.warn(f"converted module by module: {error.what}", stacklevel=2)
        return None


def export_freely(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ExportedProgram:
    """Export ``module`` with all sizes of its inputs free, except those that its code fixes.

    Law: the first size of every input is free, and on the example the program gives outputs of
    the module's own shapes. An example of a single sample is doubled: ``torch.export`` takes a
    size of 1 for a constant.

    Raises:
        ModelError: If the module cannot be exported in this way; says why.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    single = all(x.shape[0] == 1 for x in tensors if x.ndim)
    given, named = tree_map(_doubled, (args, dict(kwargs))) if single else (args, dict(kwargs))
    shapes = _all_free(module, given, named)
    program = frontend.capture(module, given, named, dynamic_shapes=shapes).program
    for spec in ProgramSignature.of(program).inputs:
        if spec.shape and isinstance(spec.shape[0], int):
            raise ModelError(f"the first size of its input {spec.name} cannot vary")
    with torch.no_grad(), evaluating(module):
        exported_shapes, wanted = (
            [x.shape for x in tree_leaves(one(*args, **kwargs)) if isinstance(x, torch.Tensor)]
            for one in (runnable(program), module)
        )
    if exported_shapes != wanted:
        raise ModelError("the shape of its outputs depends on the size of the batch")
    return program


def _all_free(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``dynamic_shapes`` of ``torch.export``: every size free that the code does not fix."""
    shapes = ShapesCollection()
    for one in tree_leaves((args, kwargs)):
        if isinstance(one, torch.Tensor):
            shapes[one] = dict.fromkeys(range(one.ndim), Dim.AUTO)
    return shapes.dynamic_shapes(module, args, kwargs)


def _doubled(x: Any) -> Any:
    return torch.cat([x, x]) if isinstance(x, torch.Tensor) and x.ndim else x


class TorchResult(nn.Module):
    """A converted module, called as the original is.

    Attributes:
        model: The converted module itself.
        lowered: How many ops (or modules) are low.
        products: How many of them are matrix products or convolutions.
        lowered_modules: The class of each low module, where there is no graph.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        low: Sequence[str] = (),
        program: ExportedProgram | None = None,
        modules: Mapping[str, str] | None = None,
        precision: Format = Format.BF16,
    ) -> None:
        super().__init__()
        self.model = model
        self.precision = precision
        self.lowered_modules = dict(modules or {})
        self.program = program
        self._low = tuple(low)
        self.training = model.training  # a planned graph is in evaluation mode

    @property
    def lowered(self) -> int:
        """How many ops (or modules) are low."""
        return len(self._low) or len(self.lowered_modules)

    @property
    def products(self) -> int:
        """How many of them are matrix products or convolutions."""
        return products_in(self._low) or len(self.lowered_modules)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The converted module's outputs."""
        return self.model(*args, **kwargs)

    def predict(self, inputs: Any) -> Any:
        """Outputs on one batch."""
        args, kwargs = arguments(inputs)
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> TorchResult:
        """Refuse another type before any module has it: parts are applied to one by one."""
        check_types_stay(self, fn)
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchResult:
        """A result with tensors of its own; the program never changes, and is shared."""
        memo[id(self)] = made = TorchResult(
            copy.deepcopy(self.model, memo),
            low=self._low,
            program=self.program,
            modules=self.lowered_modules,
            precision=self.precision,
        )
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """A planned graph is saved with its program, which torch does not pickle.

        Raises:
            UsageError: If it is one.
        """
        if self.program is not None:
            raise UsageError(
                "the result of fit cannot be pickled, as by torch.save",
                fix="use result.save(folder), and load(folder); or torch.save(result.model)",
            )
        return super().__reduce_ex__(protocol)

    def save(self, root: str | Path) -> None:
        """Write the model to the folder ``root``, from where ``load`` reads it.

        A planned graph is saved as a program, ``best_model.pt2``, and ``plan.json``. A module
        converted module by module is saved as its state, ``best_model.pt``, and the names of
        low modules, ``best_configure.json``.

        Raises:
            UsageError: If they cannot be written.
        """
        folder = Path(root)
        if self.program is None:
            state = io.BytesIO()
            torch.save(self.model.state_dict(), state)
            settings = {
                "version": _VERSION,
                "precision": self.precision.label,
                "modules": self.lowered_modules,
            }
            write_bytes(folder / STATE, state.getvalue(), make_folder=True)
            write_bytes(folder / SETTINGS, json.dumps(settings, indent=1).encode())
        else:
            plan: Any = self.model.finecast_plan
            write_bytes(folder / PLAN, plan.to_json().encode(), make_folder=True)
            args, kwargs = examples(self.program)
            free = _all_free(self.model, args, kwargs)
            with quiet():
                program = torch.export.export(self.model, args, kwargs, dynamic_shapes=free)
            finecast_torch.save(program, folder / PROGRAM, plan=plan)
        for other in (PROGRAM, PLAN) if self.program is None else (STATE, SETTINGS):
            (folder / other).unlink(missing_ok=True)


def load_module(folder: Path, model: nn.Module | None, *, trust: bool = False) -> TorchResult:
    """Read what ``TorchResult.save`` wrote to ``folder``.

    Args:
        folder: The folder.
        model: The fp32 module; needed if the folder has a state and no program.
        trust: Whether the program may import what it names.

    Raises:
        UsageError: If ``model`` is needed and not given.
        ModelError: If the files are damaged, or another module's.
    """
    if (folder / PROGRAM).is_file():
        program = finecast_torch.load(folder / PROGRAM, trust=trust)
        plan = Plan.load(folder / PLAN)
        module = runnable(program)
        module.finecast_plan = plan  # type: ignore[assignment]
        return TorchResult(module, low=low_ops(plan), program=program)
    if model is None:
        raise UsageError(
            f"{STATE} is the state of a module",
            where=str(folder),
            fix="give the fp32 module, too: load(folder, model)",
        )
    precision, names = _settings(folder / SETTINGS)
    there = convertible(model)
    unlike = next((n for n, kind in names.items() if there.get(n) != kind), None)
    if unlike is not None:
        raise _unlike(folder, f"it has no {names[unlike]} called {unlike!r}")
    result = by_modules(model, names, precision)
    try:
        state = torch.load(folder / STATE, weights_only=True)
        result.model.load_state_dict(state)
    except Exception as error:  # torch's reader may raise anything for a damaged file
        raise _unlike(folder, first_line(error)) from error
    return result


def _settings(path: Path) -> tuple[Format, dict[str, str]]:
    try:
        stored = json.loads(path.read_text())
        version, precision, names = (stored[k] for k in ("version", "precision", "modules"))
        low, named = low_format(precision), dict(names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise ModelError(
            f"cannot be read: {error}", where=str(path), fix="save the model again"
        ) from error
    if version != _VERSION:
        raise ModelError(
            f"version {version}, not {_VERSION}", where=str(path), fix="save the model again"
        )
    return low, named


def _unlike(folder: Path, why: str) -> ModelError:
    return ModelError(
        f"the files are not of this module: {why}",
        where=str(folder),
        fix="give the module that was converted, of the same class and sizes",
    )


class LowModule(nn.Module):
    """Computes ``inner`` in ``dtype``; takes and gives fp32.

    Laws: attributes of ``inner`` can be read from this module, parameters in fp32: code that
    computes with ``layer.weight`` itself stays right. The casts are hooks, because
    PyTorch's fused transformer layers call modules that have hooks, and read the parameters of
    all others without calling them.
    """

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner.to(dtype)
        self.dtype = dtype
        self.register_forward_pre_hook(_cast_in, with_kwargs=True)
        self.register_forward_hook(_cast_out)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute; the hooks have cast the arguments."""
        return self.inner(*args, **kwargs)

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> LowModule:
        check_types_stay(self, fn)  # the hooks cast to the type that it has now
        return super()._apply(fn, recurse)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inner":  # not set yet while this module is being copied
                raise
            return _cast(getattr(self.inner, name), self.dtype, torch.float32)


def _cast_in(
    module: LowModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def data(x: object) -> object:
        return _cast(x, torch.float32, module.dtype)

    def mask(x: object) -> object:
        return _cast(_clamped(x, module.dtype), torch.float32, module.dtype)

    first = tree_map(data, args[:_DATA_ARGUMENTS])
    rest = tree_map(mask, args[_DATA_ARGUMENTS:])
    named = {k: tree_map(data if k in _DATA_NAMES else mask, v) for k, v in kwargs.items()}
    return (*first, *rest), named


def _cast_out(module: LowModule, args: object, result: object) -> object:
    del args
    return tree_map(lambda x: _cast(x, module.dtype, torch.float32), result)


def _cast(x: object, source: torch.dtype, target: torch.dtype) -> object:
    return x.to(target) if isinstance(x, torch.Tensor) and x.dtype is source else x


def _clamped(x: object, dtype: torch.dtype) -> object:
    """Clamp finite fp32 numbers to the range of ``dtype``.

    fp32's lowest number, the usual mask, would become -Inf in bf16, and rows of it NaN.
    """
    if not isinstance(x, torch.Tensor) or x.dtype is not torch.float32:
        return x
    most = torch.finfo(dtype).max
    return torch.where(x.isinf(), x, x.clamp(-most, most))


def convertible(module: nn.Module) -> dict[str, str]:
    """The class of each submodule that can be converted, by name; none is inside another.

    A module that has several names is listed under each.
    """
    classes: dict[str, str] = {}
    outer: str | None = None
    for name, one in module.named_modules(remove_duplicate=False):
        inside = outer is not None and (not outer or name.startswith(f"{outer}."))
        if isinstance(one, CONVERTED) and not inside:
            outer = name
            classes[name] = type(one).__name__
    return classes


def by_modules(module: nn.Module, names: Mapping[str, str], low: Format) -> TorchResult:
    """A copy of ``module`` with the submodules called ``names`` in ``low``.

    A parameter that they share with other modules is lowered in them only.
    """
    copied, dtype = copy.deepcopy(module), DTYPES[low]
    if "" in names:
        copied = LowModule(copied, dtype)
    lowered: dict[nn.Module, LowModule] = {}
    for name in filter(None, names):
        parent_name, _, last = name.rpartition(".")
        parent = copied.get_submodule(parent_name)
        one = getattr(parent, last)
        if isinstance(one, LowModule):  # the parent has two names, and came by the other
            continue
        if one not in lowered:
            lowered[one] = LowModule(copy.deepcopy(one), dtype)
        setattr(parent, last, lowered[one])
    for one in copied.modules():
        if isinstance(one, nn.TransformerEncoder):
            one.use_nested_tensor = False  # only its fused layers take nested tensors
    return TorchResult(copied, modules=names, precision=low)
