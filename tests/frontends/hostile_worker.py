"""The worker with passes that do what onnx's do on hostile models: a process of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from finecast.frontends.onnx import native_worker


def _misbehave(message: bytes, version: int) -> bytes:
    if version == CRASHES:
        os.kill(os.getpid(), signal.SIGSEGV)
    elif version == HANGS:
        while True:  # as C++ does, it never looks at signals
            time.sleep(1)
    elif version == GROWS:
        return bytes(4 << 30)
    elif version == SAYS_PID:
        raise RuntimeError(f"{os.getpid()}\nwith a second line")
    elif version == PRINTS:
        os.write(1, b"not an answer\n")
        os.write(2, b"nor this\n")
    return message


CRASHES, HANGS, GROWS, SAYS_PID, PRINTS, NOTHING = range(6)


def answer(
    request: Mapping[str, Any], payload: bytes, tell_stage: Callable[[str], None]
) -> tuple[dict[str, str], bytes]:
    if request["pass"] == "convert":
        native_worker.PASSES["convert"] = _misbehave
    return native_worker.answer(request, payload, tell_stage)
