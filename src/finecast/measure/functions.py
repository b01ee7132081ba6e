"""The user's own Python functions, named as ``FILE.py:FUNCTION``."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finecast.errors import UsageError


def load_function(spec: str) -> Callable[..., Any]:
    """Import the file and return the function in it.

    Raises:
        UsageError: If the spec is malformed, the file or function is missing, or importing
            fails (gives the file's line).
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


def load_module(path: Path) -> object:
    """Import a Python file by its path.

    Raises:
        UsageError: If it is missing or importing fails (gives the file's line).
    """
    if not path.is_file():
        raise UsageError("no such Python file", where=str(path), fix="check the path")
    loader = importlib.util.spec_from_file_location(f"finecast_user_{path.stem}", path)
    if loader is None or loader.loader is None:
        raise UsageError("not a Python file", where=str(path), fix="give a .py file")
    module = importlib.util.module_from_spec(loader)
    sys.modules[module.__name__] = module  # dataclasses and pickles look it up there
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as `python FILE.py` would find what lies beside it
    try:
        loader.loader.exec_module(module)
    except Exception as error:
        raise UsageError(
            f"importing fails: {type(error).__name__}: {error}",
            where=_line_of(error, path),
            fix="run the file with python to see more",
        ) from error
    finally:
        sys.path.remove(folder)
    return module


def _line_of(error: Exception, path: Path) -> str:
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)
