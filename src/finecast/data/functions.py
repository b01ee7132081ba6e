"""The user's own Python functions, named as ``FILE.py:FUNCTION``.

Law: a file is imported once, however many of its functions are asked for, and again only if
its bytes have changed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

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
