"""Checks that a converted module's inputs are those that it was captured for.

``torch.export`` writes down what one call does. A number, a flag or None is part of that, and
so is every size that was not said to be free: what the module does for others is not there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter
from torch.utils._pytree import tree_leaves

from finecast.errors import UsageError, first_line
from finecast.naming import kind_of

_PLAIN: Final = (bool, int, float, str, type(None))
_LEAST_FREE: Final = 2
_LSTM: Final = torch.ops.aten.lstm.input
_FREE: Final = "capture the module with dynamic_shapes, as torch.export.export takes them"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedInput:
    """What a leaf of the arguments has to be.

    Attributes:
        name: The placeholder's.
        is_tensor: Whether it is a tensor; else it has to be ``constant``.
        constant: The number, flag, text or None that the module was captured with.
        sizes: Of a tensor, each axis's size if it is fixed, or the name of its free size. None
            for a size that is computed from others, which the graph checks.
        dtype: Of a tensor of numbers with a fraction, its type; other types are not looked at.
    """

    name: str
    is_tensor: bool
    constant: Any = None
    dtype: torch.dtype | None = None
    sizes: tuple[int | str | None, ...] = ()


Bounds = Mapping[str, tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSizes:
    """Calls whose tensors have other sizes than the module was captured with.

    Attributes:
        text: The first of them, in words.
        args: The positional inputs of that call.
        kwargs: Its keyword inputs.
        axes: Which axes of which leaves of the inputs had another size in any call.
    """

    text: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    axes: frozenset[tuple[int, int]]


@dataclass(slots=True, kw_only=True)
class InputCheck:
    """Looks at a module's inputs before each call; it can be pickled with the module."""

    expected: Sequence[ExpectedInput | None]
    bounds: Bounds
    told: bool = False

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Raise UsageError for inputs that the module does not hold for, or warn."""
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            return
        leaves = tree_leaves((args, kwargs))
        _check_no_autocast({x.device.type for x in leaves if isinstance(x, torch.Tensor)})
        other = self.other_size(args, kwargs)
        if other and isinstance(module, GraphModule):
            _check_states(module, leaves, other)
        if other and not self.told:
            self.told = True
            warnings.warn(
                f"{other}: what the module decides by this size stays as it was captured;"
                f" to be sure, {_FREE}",
                stacklevel=2,
            )

    def other_size(self, args: Any, kwargs: Any) -> str:
        """The first size that is fixed and another one, in words; empty if there is none.

        Raises:
            UsageError: If an input is not what the graph was captured for.
        """
        return _other_sizes(self.expected, self.bounds, tree_leaves((args, kwargs)))

    def other_sizes(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], before: OtherSizes | None
    ) -> OtherSizes | None:
        """``before`` and the fixed sizes that this call has otherwise; None if there are none.

        Inputs that differ by more than sizes are left to the call itself.
        """
        try:
            text = self.other_size(args, kwargs)
        except UsageError:
            return before
        if not text:
            return before
        leaves = zip(self.expected, tree_leaves((args, kwargs)), strict=True)
        axes = frozenset(
            (index, axis)
            for index, (law, leaf) in enumerate(leaves)
            if law is not None and law.is_tensor
            for axis, (size, got) in enumerate(zip(law.sizes, leaf.shape, strict=True))
            if isinstance(size, int) and size != got
        )
        if before is not None:
            return replace(before, axes=before.axes | axes)
        return OtherSizes(text=text, args=args, kwargs=kwargs, axes=axes)

    def failed(self, error: RuntimeError, args: Any, kwargs: Any) -> Exception:
        """What to raise for an error of the graph on these inputs."""
        other = self.other_size(args, kwargs)
        if not other or isinstance(error, torch.OutOfMemoryError):
            return error
        return _not_run(other, first_line(error))


def _not_run(other: str, why: str) -> UsageError:
    return UsageError(
        f"{other}, and the module does not run with it: {why}",
        where="the converted module",
        fix=_FREE,
    )


def _check_states(module: GraphModule, leaves: Sequence[Any], other: str) -> None:
    """Raise UsageError where the state of an LSTM is of fewer or more samples than its input.

    ATen's op does not check it, and writes beyond its memory: the module runs without numbers
    first.
    """
    if not any(_has_lstm(part) for part in module.modules()):
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in leaves]
    with mode:
        _States(module, other).run(*fake, enable_io_processing=False)


def _has_lstm(part: torch.nn.Module) -> bool:
    return isinstance(part, GraphModule) and any(n.target is _LSTM for n in part.graph.nodes)


class _States(Interpreter):
    """Runs a graph, and compares the state of each LSTM with its input."""

    def __init__(self, module: GraphModule, other: str) -> None:
        super().__init__(module)
        self.other = other

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op."""
        if target is _LSTM:
            got, state, batch_first = args[0], args[1][0], args[-1]
            count = got.shape[0 if batch_first else 1]
            if state.shape[1] != count:
                of = state.shape[1]
                why = f"the state of its LSTM is of {of} samples, its input of {count}"
                raise _not_run(self.other, why)
        return super().call_function(target, args, kwargs)


def _check_no_autocast(devices: Collection[str]) -> None:
    """Raise UsageError inside of ``torch.autocast``: it would cast ops once more."""
    for device in sorted(devices):
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            raise UsageError(
                f"torch.autocast({device!r}) is on: it would cast ops that the plan keeps in"
                " fp32",
                where="the converted module",
                fix="call it outside of the block, or inside of"
                f" torch.autocast({device!r}, enabled=False)",
            )


def input_check(module: GraphModule, program: ExportedProgram) -> InputCheck:
    """The check of the inputs of ``module``, of ``program``, at each call.

    What the graph does not hold is a UsageError when the module is called; another fixed size
    is a warning, once: most graphs do the same for any number of samples, and some do not.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    expected = [_expected(node.name, node.meta.get("val")) for node in placeholders]
    return InputCheck(expected=expected, bounds=_bounds(program))


def check_examples(
    module: GraphModule, program: ExportedProgram, args: Any, kwargs: Any
) -> None:
    """Raise UsageError for example inputs that are not those of ``program``.

    Of a module they are always: it was captured with them.
    """
    check = input_check(module, program)
    input_count = len(tree_leaves((args, kwargs)))
    other = ""
    if input_count != len(check.expected):
        other = f"the program takes {len(check.expected)} inputs, got {input_count}"
    try:
        other = other or check.other_size(args, kwargs)
    except UsageError as error:
        other = error.what
    if other:
        raise UsageError(
            other,
            where="example_inputs",
            fix="leave them out, for the program has its own, or export it for such inputs",
        )


def _expected(name: str, fake: Any) -> ExpectedInput | None:
    """The law for one placeholder; None for what is not looked at, as a free number."""
    if isinstance(fake, torch.Tensor):
        sizes = tuple(_size(size) for size in fake.shape)
        return ExpectedInput(name=name, is_tensor=True, dtype=fake.dtype, sizes=sizes)
    if isinstance(fake, _PLAIN):
        return ExpectedInput(name=name, is_tensor=False, constant=fake)
    return None


def _size(size: int | torch.SymInt) -> int | str | None:
    if isinstance(size, int):
        return size
    return str(size) if size.node.expr.is_Symbol else None


def _bounds(program: ExportedProgram) -> Bounds:
    """The range of each free size."""
    ranges: dict[str, tuple[int, float]] = {}
    for symbol, bounds in program.range_constraints.items():
        lower, upper = (int(b) if b.is_Integer else None for b in (bounds.lower, bounds.upper))
        # torch.export takes every free size for 2 or more; its graphs run for 0 and 1, too.
        lower = 0 if lower is None or lower <= _LEAST_FREE else lower
        ranges[str(symbol)] = (lower, math.inf if upper is None else upper)
    return ranges


def _other_sizes(
    expected: Sequence[ExpectedInput | None], bounds: Bounds, leaves: Sequence[Any]
) -> str:
    """The first fixed size that is another one, in words; empty if there is none.

    Raises:
        UsageError: If a leaf is not what the graph was captured for.
    """
    if len(leaves) != len(expected):
        return ""  # the module's own signature says so
    free: dict[str, int] = {}
    other = ""
    for law, leaf in zip(expected, leaves, strict=True):
        if law is None:
            continue
        if not law.is_tensor:
            _check_constant(law, leaf)
            continue
        if not isinstance(leaf, torch.Tensor) or leaf.ndim != len(law.sizes):
            raise _unlike(law, f"a tensor of {len(law.sizes)} axes", _shown(leaf))
        _check_type(law, leaf.dtype)
        for axis, (size, got) in enumerate(zip(law.sizes, leaf.shape, strict=True)):
            if isinstance(size, str):
                _check_free(law, axis, got, free.setdefault(size, got), bounds.get(size))
            elif size is not None and size != got and not other:
                other = (
                    f"input {law.name!r} was captured with {size} in axis {axis}, got {got}"
                )
    return other


def _check_constant(law: ExpectedInput, leaf: Any) -> None:
    same = type(leaf) is type(law.constant) and (
        leaf == law.constant or (leaf != leaf and law.constant != law.constant)
    )
    if not same:
        raise _unlike(law, repr(law.constant), _shown(leaf))


def _check_type(law: ExpectedInput, got: torch.dtype) -> None:
    """Raise UsageError for another type, unless both are integers: ids come in any."""
    whole = not any(t.is_floating_point or t.is_complex for t in (law.dtype or got, got))
    if law.dtype not in (None, got) and not whole:
        raise _unlike(law, f"{law.dtype}", f"{got}")


def _check_free(
    law: ExpectedInput, axis: int, got: int, first: int, bounds: tuple[int, float] | None
) -> None:
    lowest, highest = bounds or (0, math.inf)
    if got != first:
        raise _unlike(law, f"{first} in axis {axis}, as other inputs have", str(got))
    if not lowest <= got <= highest:
        wanted = f"{lowest} to {highest}" if highest < math.inf else f"at least {lowest}"
        raise _unlike(law, f"{wanted} in axis {axis}", str(got))


def _unlike(law: ExpectedInput, wanted: str, got: str) -> UsageError:
    return UsageError(
        f"input {law.name!r} was captured with {wanted}, got {got}",
        where="the converted module",
        fix="call it with inputs as its examples are, or convert the module with others",
    )


def _shown(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of shape {list(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, _PLAIN) else f"{kind_of(leaf)}"
