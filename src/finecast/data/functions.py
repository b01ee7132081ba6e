"""The user's own Python functions, named ``FILE.py:FUNCTION``, and what they have to return.

Law: a file is imported once, however many of its functions are asked for, and again only if
its bytes have changed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

import numpy as np

from finecast.data.metrics import Score
from finecast.data.samples import mean_samples
from finecast.data.streams import to_array
from finecast.engines.base import Array
from finecast.errors import UsageError, UserCodeError
from finecast.usercode import guarded, line_in

_FIX: Final = "run the file with python to see more"
# Attribute of each module loaded here: the digest of the source that it was made from.
_SOURCE: Final = "__finecast_source__"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionElsewhere:
    """A user's function that is loaded, and runs, in another process alone.

    Attributes:
        spec: ``FILE.py:FUNCTION``.
        digest: Gives the ``source_digest`` of the function there.
        feeds: Gives the feeds that the function yields there.
    """

    spec: str
    digest: Callable[[], str]
    feeds: Callable[[], Iterator[Any]] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """The feeds of a calibration function. What evaluates a model is not called here."""
        assert self.feeds is not None
        assert not arguments
        return self.feeds()


def load_function(spec: str) -> Callable[..., Any]:
    """Import the file and return the function in it.

    Raises:
        UsageError: If the spec is malformed, or the file or function is missing.
        UserCodeError: If importing fails (gives the file's line).
    """
    file, colon, name = spec.rpartition(":")
    if not (colon and file and name):
        raise UsageError(f"{spec!r} names no function", fix="write FILE.py:FUNCTION")
    module = load_module(Path(file))
    function = getattr(module, name, None)
    if not callable(function):
        defined = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        raise UsageError(
            f"there is no function {name!r}",
            where=file,
            fix=f"it defines {', '.join(defined) or 'none'}",
        )
    return function


def load_module(path: Path) -> ModuleType:
    """Import a Python file by its path, once.

    Raises:
        UsageError: If it is missing.
        UserCodeError: If importing fails (gives the file's line).
    """
    if not path.is_file():
        raise UsageError("no such Python file", where=str(path), fix="check the path")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read the file: {error.strerror}", where=str(path), fix="check the path"
        ) from error
    real, digest = str(path.resolve()), hashlib.sha256(source).hexdigest()
    name = f"finecast_user_{path.stem}_{hashlib.sha256(os.fsencode(real)).hexdigest()[:8]}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, _SOURCE, None) == digest:
        return known
    module = ModuleType(name)
    module.__file__ = str(path)
    setattr(module, _SOURCE, digest)
    sys.modules[name] = module  # dataclasses and pickle look modules up there
    try:
        _run(source, path, module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _run(source: bytes, path: Path, module: ModuleType) -> None:
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as with `python FILE.py`, which can import files beside it
    try:
        with guarded("importing fails", where=str(path), fix=_FIX):
            exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except UserCodeError as error:
        cause = error.__cause__
        if isinstance(cause, SyntaxError) and cause.filename == str(path):
            where = f"{path}:{cause.lineno}"
        else:
            where = line_in(str(path), None if cause is None else cause.__traceback__)
        raise UserCodeError(error.what, where=where, fix=error.fix) from cause
    finally:
        with contextlib.suppress(ValueError):  # the file itself may have removed it
            sys.path.remove(folder)


def source_digest(function: Callable[..., Any]) -> str:
    """A digest of a function's name, its file, and the loaded modules in that file's folder.

    Modules from elsewhere and data that the function reads do not count. A function without a
    file (typed into a session) has another digest at each call.
    """
    if isinstance(function, FunctionElsewhere):
        return function.digest()
    while isinstance(function, functools.partial):
        function = function.func
    code = inspect.unwrap(function)
    code = code if hasattr(code, "__code__") else type(code)
    module = sys.modules.get(getattr(code, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if file is None or not os.path.isfile(file):
        return secrets.token_hex(16)
    total = hashlib.sha256(getattr(code, "__qualname__", "").encode())
    total.update(getattr(module, _SOURCE, "").encode())
    folder = os.path.dirname(os.path.realpath(file))
    for path in sorted({os.path.realpath(file), *_loaded_from(folder)}):
        total.update(path.encode() + b"\0" + _bytes_of(path))
    return total.hexdigest()[:16]


def _loaded_from(folder: str) -> set[str]:
    """Python files of loaded modules in ``folder``; installed packages do not count."""
    files = (getattr(m, "__file__", None) for m in list(sys.modules.values()))
    real = (os.path.realpath(f) for f in files if isinstance(f, str) and f.endswith(".py"))
    return {
        f
        for f in real
        if f.startswith(folder + os.sep)
        and not {"site-packages", "dist-packages"} & set(f.split(os.sep))
    }


def _bytes_of(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).digest()
    except OSError:
        return b""


# --------------------------------------------- what a user's evaluation function has to return
#
# Law: the baseline is a finite number that the function computes from the model's outputs, the
# same one for the same outputs. Anything else says nothing of a converted model.

T = TypeVar("T")
Replacement: TypeAlias = Callable[[Array], Array]

# Outputs of the baseline of so many bytes are kept for a second call of a user's function.
_RECORDED_BYTES: Final = 256 << 20
# Two values of one metric differ by no more: sums in other orders do.
_SAME_METRIC: Final = 1e-9
_SHOWN: Final = 40


def _negated(array: Array) -> Array:
    return np.negative(array) if array.dtype.kind == "f" else _reversed(array)


def _reversed(array: Array) -> Array:
    return array.reshape(-1)[::-1].reshape(array.shape)


_DRAWS: Final = np.random.default_rng(0)


def _drawn(array: Array) -> Array:
    if array.dtype.kind != "f":
        return _DRAWS.permuted(array.reshape(-1)).reshape(array.shape)
    return _DRAWS.standard_normal(array.shape).astype(array.dtype)


# Outputs in place of a model's: what is no number for any of them follows no output. The first
# changes nearly every metric; a metric that is 0 for many models needs the others. A metric
# that compares two calls, such as of a module and of the original, is the same where both are
# replaced alike: the last draws other numbers in each call.
_REPLACEMENTS: Final[tuple[Replacement, ...]] = (_negated, np.zeros_like, _reversed, _drawn)


class OtherCallError(Exception):
    """An evaluation on replaced outputs asks for others than are recorded: it follows them."""


class Recording(Generic[T]):
    """The outputs of the calls of an evaluation, to repeat it without the model."""

    def __init__(self) -> None:
        self._kept: list[tuple[bytes, T] | None] = []
        self._left = _RECORDED_BYTES
        self._at = 0

    def keep(self, key: bytes, outputs: T, size_bytes: int) -> None:
        """Keep the outputs of the next call, of inputs with this key, if there is room."""
        self._left -= size_bytes
        self._kept.append((key, outputs) if self._left >= 0 else None)

    def lose(self) -> None:
        """Note that the next call has outputs that cannot be kept."""
        self._kept.append(None)

    @property
    def is_whole(self) -> bool:
        """Whether the outputs of all calls were kept."""
        return None not in self._kept

    @property
    def outputs(self) -> list[T]:
        """The outputs of all calls whose outputs were kept."""
        return [kept[1] for kept in self._kept if kept is not None]

    def again(self) -> Recording[T]:
        """The same calls from the first on."""
        recording = Recording[T]()
        recording._kept = self._kept
        return recording

    @classmethod
    def of(cls, outputs: Sequence[T]) -> Recording[T]:
        """Calls with these outputs, whatever their inputs are."""
        recording = cls()
        recording._kept = [(b"", output) for output in outputs]
        return recording

    def next(self, key: Callable[[], bytes]) -> T | None:
        """The outputs of the next call; None if they are not kept or its inputs are others."""
        kept = self._kept[self._at] if self._at < len(self._kept) else None
        self._at += 1
        if kept is None or (kept[0] and kept[0] != key()):
            return None
        return kept[1]


def metric_value(found: object, where: str) -> Score:
    """What a user's evaluation function returned, as a number.

    A one-dimensional array or tensor has a number for each sample, where False is 0 and True
    is 1, and the metric is their mean.

    Raises:
        UserCodeError: If it is no real number: a single truth value, text, several values.
    """
    known = hasattr(found, "detach") or isinstance(found, np.ndarray | np.generic)
    array = to_array(found) if known else None
    if array is not None and array.ndim == 1 < array.size and array.dtype.kind in "biuf":
        samples = mean_samples(array.astype(np.float64))
        return Score(samples.value(), samples={"": samples})
    try:
        value: Any = found if array is None else array.item()
        no_number = isinstance(value, bool | complex | str | bytes | bytearray)
        return Score(float(cast("Any", None if no_number else value)))
    except (TypeError, ValueError) as error:
        shown = repr(found)
        fix = "return a float, or a one-dimensional array with a number for each sample"
        raise UserCodeError(
            f"the evaluation function returns {shown if len(shown) < _SHOWN else 'an object'}"
            f" of type {type(found).__name__}, not a number",
            where=where,
            fix=f"{fix}; of several values the one to keep" if _is_group(found) else fix,
        ) from error


def _is_group(found: object) -> bool:
    return isinstance(found, tuple | list | Mapping)


def check_finite(baseline: float, where: str) -> None:
    """Refuse a baseline of Inf: no loss can be told from it.

    Raises:
        UserCodeError: If it is infinite.
    """
    if math.isinf(baseline):
        raise UserCodeError(
            f"the evaluation function returns {baseline:g} for the fp32 model: how much"
            " worse another model is cannot be said",
            where=where,
            fix="return a finite number; a ratio to the fp32 model's own outputs is --metric"
            " snr_db, cosine or max_abs",
        )


def check_baseline(
    baseline: float,
    where: str,
    *,
    runs: bool,
    again: Callable[[], float],
    replaced: Callable[[Replacement], float | None],
    call: str,
) -> None:
    """Refuse a metric of the fp32 model that says nothing of a model.

    NaN is left to the caller, who tells the op that first gives it.

    Args:
        baseline: The metric of the fp32 model.
        where: The function's name.
        runs: Whether the function ran the model.
        again: Calls the function with the model's recorded outputs.
        replaced: Calls the function with replaced outputs; None where they are not known.
        call: How the function runs the model.

    Raises:
        UserCodeError: If it never ran the model, or returns no finite number, different ones
            for the same outputs, or the same for any outputs.
    """
    if not runs:
        raise UserCodeError(
            f"the evaluation function returns {baseline:g} and never ran the model",
            where=where,
            fix=f"call {call} in it, and compute the number from the outputs",
        )
    if math.isnan(baseline):
        return
    check_finite(baseline, where)
    second = again()
    if not math.isclose(baseline, second, rel_tol=_SAME_METRIC, abs_tol=_SAME_METRIC):
        raise UserCodeError(
            "the evaluation function returns different numbers for the same outputs of the"
            f" fp32 model: {baseline:.9g}, then {second:.9g}",
            where=where,
            fix="begin with the same data in each call, and seed its random choices",
        )
    if all(quietly(functools.partial(replaced, one)) == baseline for one in _REPLACEMENTS):
        raise UserCodeError(
            f"the evaluation function returns {baseline:g} whatever the outputs are: with"
            " their negatives, with zeros, in reverse order and with random numbers, too",
            where=where,
            fix=f"compute the number from what {call} returns, on data of which the"
            " model gets some right",
        )


def quietly(replaced: Callable[[], float | None]) -> float | None:
    """The metric of replaced outputs; None if it is not known.

    The function may not take such outputs. What it prints of them is no result.
    """
    quiet = redirect_stdout(StringIO()), redirect_stderr(StringIO())
    with quiet[0], quiet[1], np.errstate(all="ignore"), suppress(UserCodeError):
        return replaced()
    return None
