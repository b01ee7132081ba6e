"""onnx's C++ passes over bytes, and the loop that runs them for another process.

``native`` runs this file as a process of its own. It imports nothing of finecast, so that it
starts as fast as onnx does.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import onnx
import onnx.inliner
from onnx import version_converter

try:
    import resource
except ImportError:  # on Windows, where memory is not limited
    resource = None

_STATM: Final = Path("/proc/self/statm")


def _infer(message: bytes, data_prop: int) -> bytes:
    done = onnx.shape_inference.infer_shapes(message, data_prop=bool(data_prop))
    return done.SerializeToString()


def _convert(message: bytes, version: int) -> bytes:
    model = onnx.ModelProto.FromString(message)
    return version_converter.convert_version(model, version).SerializeToString()


def _inline(message: bytes) -> bytes:
    model = onnx.ModelProto.FromString(message)
    done = onnx.inliner.inline_local_functions(model, convert_version=True)
    return done.SerializeToString()


def _check(path: bytes) -> bytes:
    onnx.checker.check_model(os.fsdecode(path), full_check=True)
    return b""


# By name: functions of a serialized model, or of a file's path, that return serialized models.
PASSES: Final[dict[str, Callable[..., bytes]]] = {
    "infer": _infer,
    "convert": _convert,
    "inline": _inline,
    "check": _check,
}


def answer(
    name: str, payload: bytes, options: Mapping[str, Any]
) -> tuple[dict[str, str], bytes]:
    """Run one pass; returns a header that says how it ended, and the result. Never raises."""
    try:
        return {"status": "done"}, PASSES[name](payload, **options)
    except MemoryError:
        return {"status": "died", "text": "ran out of memory"}, b""
    except Exception as error:  # whatever C++ throws; its text goes to the caller
        kind, lines = type(error).__name__, str(error).strip().splitlines()
        return {"status": "raised", "text": lines[0] if lines else kind}, b""


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Answer requests until ``source`` ends.

    A request is a line of JSON, then the model, of as many bytes as the line has as ``size``.
    The line has the name of the ``pass``, its ``options``, and its limits: ``memory`` in
    bytes, and ``seconds``. An answer has the same form, with a ``status`` and ``text``.
    """
    limit_memory = _memory_limit()
    _send(target, {"status": "ready"})
    while line := source.readline():
        request = json.loads(line)
        limit_memory(request["memory"])
        # A thread in C, so it ends even a pass that never returns to Python, and after the
        # calling process is gone.
        faulthandler.dump_traceback_later(request["seconds"], exit=True)
        payload = source.read(request["size"])
        header, result = answer(request["pass"], payload, request["options"])
        faulthandler.cancel_dump_traceback_later()
        _send(target, header, result)


def _send(target: BinaryIO, header: Mapping[str, str], payload: bytes = b"") -> None:
    line = json.dumps({**header, "size": len(payload)}).encode()
    target.write(line + b"\n")
    target.write(payload)
    target.flush()


def _memory_limit() -> Callable[[int], None]:
    """A function that sets how many bytes this process may take beyond what it takes now.

    It does nothing where the system has no such limit (macOS, Windows).
    """
    if resource is None or not _STATM.exists():
        return lambda more: None
    known = resource
    idle = int(_STATM.read_text().split()[0]) * known.getpagesize()
    soft, hard = known.getrlimit(known.RLIMIT_AS)
    stated = [limit for limit in (soft, hard) if limit != known.RLIM_INFINITY]

    def limit(more: int) -> None:
        known.setrlimit(known.RLIMIT_AS, (min([idle + more, *stated]), hard))

    return limit


def main() -> None:
    """Answer requests from standard input on standard output.

    Both are moved to other descriptors first, as onnx's C++ prints: that output is dropped.
    """
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    if resource is not None:  # the caller reports a crash: no core dumps
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the caller ends this process
    with suppress(BrokenPipeError):  # the caller is gone
        serve(source, target)


if __name__ == "__main__":
    main()
