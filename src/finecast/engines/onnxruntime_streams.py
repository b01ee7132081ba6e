"""ONNX Runtime with several requests in flight: one thread for each, one session for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

from finecast.engines.base import Feeds


@final
class OnnxRuntimeStreams:
    """A session whose runs take one thread each, called from a thread for each CPU.

    So a server runs it that wants throughput: products of one request are not split.
    """

    def __init__(self, run: Callable[[Feeds], object], requests: int) -> None:
        self._run = run
        self._requests = requests
        self._threads = ThreadPoolExecutor(requests, thread_name_prefix="finecast-request")

    @property
    def requests(self) -> int:
        """One for each CPU."""
        return self._requests

    def serve(self, feeds: Sequence[Feeds]) -> None:
        """Each as soon as a thread is free.

        Raises:
            UsageError: If the feeds do not fit the inputs.
            EngineError: If ONNX Runtime fails.
        """
        for _ in self._threads.map(self._run, feeds):
            pass
