"""The process of a ``worker.Worker``: answers requests from standard input on standard output.

It is run as ``python worker_process.py FILE ARGUMENT...`` and imports nothing of finecast, so
that it starts as fast as what FILE imports. FILE defines
``answer(request, payload, tell)``, which returns a header and a payload, or raises an error.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

try:
    import resource
except ImportError:  # on Windows, where memory is not limited
    resource = None

_STATM: Final = Path("/proc/self/statm")

Requests: TypeAlias = "queue.SimpleQueue[tuple[dict[str, Any], bytes]]"
"""Headers of requests, each with its payload."""


def serve(answer: Callable[..., Any], requests: Requests, target: BinaryIO) -> None:
    """Answer requests for as long as this process lives.

    A request is a line of JSON, then a payload, of as many bytes as the line has as ``size``.
    The line may have limits: ``memory`` in bytes beyond what the process took as it started,
    or ``more_memory`` beyond what it takes now, None for no limit; and ``seconds``. An answer
    has the same form, with a ``status``. Before it there may be messages of what FILE tells on
    the way: a text, and as ``tells`` its kind.
    """
    limit_memory, idle = _memory_limit(), _address_bytes()
    send = _sender(target)
    send({"status": "ready"})
    while True:
        request, payload = requests.get()
        if "memory" in request:
            limit_memory(request["memory"], idle)
        if "more_memory" in request:
            limit_memory(request["more_memory"], _address_bytes())
        if "seconds" in request:
            # A thread in C, so it ends even a call that never returns to Python, and after
            # the calling process is gone.
            faulthandler.dump_traceback_later(request["seconds"], exit=True, file=2)
        header, result = answered(answer, request, payload, partial(_tell, send))
        faulthandler.cancel_dump_traceback_later()
        send(header, result)


def answered(answer: Callable[..., Any], *asked: Any) -> tuple[Mapping[str, Any], bytes]:
    """What ``answer`` returns, or an answer that says what it raised."""
    try:
        return answer(*asked)
    except MemoryError:
        return {"status": "died", "text": "ran out of memory"}, b""
    except Exception as error:  # whatever C++ throws; its text goes to the caller
        return {"status": "raised", "kind": type(error).__name__, "text": str(error)}, b""


def _tell(send: Callable[..., None], text: str, kind: str = "stage") -> None:
    send({"tells": kind, "text": text})


def _read(source: BinaryIO, requests: Requests) -> None:
    """Put requests into the queue; where they end, end this process and what it started.

    The caller wants no more, or was killed, perhaps while a request is worked on or FILE is
    imported: nobody waits for the answer.
    """
    while line := source.readline():
        request = json.loads(line)
        payload = source.read(request["size"])
        if len(payload) < request["size"]:
            break
        requests.put((request, payload))
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _sender(target: BinaryIO) -> Callable[..., None]:
    """A function that sends a header and a payload; threads may call it."""
    lock = threading.Lock()

    def send(header: Mapping[str, str], payload: bytes = b"") -> None:
        line = json.dumps({**header, "size": len(payload)}).encode()
        with lock, suppress(BrokenPipeError):  # the caller is gone
            target.write(line + b"\n")
            target.write(payload)
            target.flush()

    return send


def _memory_limit() -> Callable[[int | None, int], None]:
    """A function that sets how many bytes this process may take beyond others.

    Without bytes the limit is the one that the process started with. It does nothing where the
    system has no such limit (macOS, Windows).
    """
    if resource is None or not _STATM.exists():
        return lambda more, beyond: None
    known = resource
    soft, hard = known.getrlimit(known.RLIMIT_AS)
    stated = [limit for limit in (soft, hard) if limit != known.RLIM_INFINITY]

    def limit(more: int | None, beyond: int) -> None:
        least = soft if more is None else min([beyond + more, *stated])
        known.setrlimit(known.RLIMIT_AS, (least, hard))

    return limit


def _address_bytes() -> int:
    """The addresses that this process takes; 0 where the system does not tell."""
    if resource is None or not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[0]) * resource.getpagesize()


def main() -> None:
    """Serve what FILE answers.

    Standard input and output are moved to other descriptors first, as libraries in C++ print:
    that output is dropped.
    """
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    if resource is not None:  # the caller reports a crash: no core dumps
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # Linux ends this process first where memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the caller ends this process
    requests = queue.SimpleQueue[tuple[dict[str, Any], bytes]]()
    threading.Thread(target=_read, args=(source, requests), daemon=True).start()
    del sys.argv[0]
    stated = importlib.util.spec_from_file_location("finecast_served", sys.argv[0])
    assert stated is not None
    assert stated.loader is not None
    served = importlib.util.module_from_spec(stated)
    sys.modules[stated.name] = served  # where a dataclass looks for its module
    stated.loader.exec_module(served)
    serve(served.answer, requests, target)


if __name__ == "__main__":
    main()
