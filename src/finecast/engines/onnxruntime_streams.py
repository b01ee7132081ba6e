"""ONNX Runtime with several requests at a time: one thread for each, one session for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

from finecast.engines.base import Feeds


@final
class OnnxRuntimeStreams:
    """A session whose runs take one thread each, called from as many threads as CPUs.

    Servers that want throughput run it so: the work of one request is not split.
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
        """Run the model on each of ``feeds``, as soon as a thread is free.

        Raises:
            UsageError: If the feeds do not fit the inputs.
            EngineError: If ONNX Runtime fails.
        """
        for _ in self._threads.map(self._run, feeds):
            pass
