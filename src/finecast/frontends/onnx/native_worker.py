"""onnx's C++ passes over bytes, and the loop that serves them to another process.

Run as a file this is that process: ``native`` starts and bounds it. It imports nothing of
finecast, so that it is up as fast as onnx is.
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
except ImportError:  # Windows: memory has no bound there
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


# By name: a message, or a file's path, in; a message out.
PASSES: Final[dict[str, Callable[..., bytes]]] = {
    "infer": _infer,
    "convert": _convert,
    "inline": _inline,
    "check": _check,
}


def answer(
    name: str, payload: bytes, options: Mapping[str, Any]
) -> tuple[dict[str, str], bytes]:
    """Run one pass: a header with what became of it, and the result. Raises nothing."""
    try:
        return {"status": "done"}, PASSES[name](payload, **options)
    except MemoryError:
        return {"status": "died", "text": "ran out of memory"}, b""
    except Exception as error:  # whatever C++ throws: its text goes to the caller
        kind, lines = type(error).__name__, str(error).strip().splitlines()
        return {"status": "raised", "text": lines[0] if lines else kind}, b""


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Answer requests until ``source`` ends.

    A request is a line of JSON and ``size`` bytes: the ``pass``, its ``options``, and what it
    may take, ``memory`` bytes and ``seconds``. So is an answer: its ``status`` and ``text``.
    """
    limit_memory = _memory_limit()
    _send(target, {"status": "ready"})
    while line := source.readline():
        request = json.loads(line)
        limit_memory(request["memory"])
        # A thread of C's: it ends a pass that never returns to Python, and does so when the
        # process that asked is gone too.
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
    """Sets how many bytes this process may take beyond what it takes now.

    Nothing is set where the system has no such limit (macOS, Windows).
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
    """Serve the pipe that standard input and output are.

    onnx's C++ prints: its output goes nowhere, the answers to a descriptor of their own.
    """
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    if resource is not None:  # a crash is answered for, and nobody wants its core
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, who ends this
    with suppress(BrokenPipeError):  # or is gone
        serve(source, target)


if __name__ == "__main__":
    main()
