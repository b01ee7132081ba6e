"""Workers on the nodes of a Ray cluster (https://docs.ray.io), for ``--executor ray``.

Laws: a node's workers give the numbers of this machine, since nodes of another environment
take no part. Requests are idempotent tasks of Ray: what a lost node had is asked of another
one. A race is one task, which holds a node's ``timing`` resource and all its cores. Files
travel once to a node, by what they hold. This process alone writes studies and results.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from finecast.data import file_of
from finecast.errors import EngineError, UsageError, first_line
from finecast.evaluation import LocalWorker, NodeLostError, Opening, WorkerProcess
from finecast.files import digest
from finecast.measure import machine_environment as environment
from finecast.processes import Answer, WorkerDiedError
from finecast.progress import Notice, Progress

_CHUNK_BYTES: Final = 64 << 20
"""Of a file that travels: a node holds so much of it in memory at a time."""
_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_STARTS_S: Final = 300.0
_TIMING: Final = "timing"
"""The resource of nodes on which models may be timed."""
_INSTALL: Final = "pip install ray, of one version on all nodes"


class NodeProcess:
    """What a node keeps from task to task: a worker process, and the files that it reads."""

    def __init__(self) -> None:
        self._process = LocalWorker()
        self._folder = Path(tempfile.gettempdir()) / f"finecast-files-{os.getuid()}"

    def environment(self) -> dict[str, Any]:
        """The node's machine and installation."""
        return environment().as_json()

    def has(self, name: str) -> str:
        """The path of a file if it is here; else empty."""
        path = self._folder / name
        return str(path) if path.exists() else ""

    def put(self, name: str, of: str, chunks: Sequence[Any]) -> str:
        """Write a file of the digest ``of`` from references to its bytes; returns its path.

        Raises:
            EngineError: If it is not what was sent.
        """
        ray: Any = importlib.import_module("ray")
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        with staged.open("wb") as file:
            for chunk in chunks:
                file.write(ray.get(chunk))
        if digest(staged) != of:
            staged.unlink()
            raise EngineError("a file arrived damaged", where=name, fix="run it again")
        staged.replace(path)
        return str(path)

    def ask(self, request: Mapping[str, Any], payload: bytes) -> tuple[Answer | str, str]:
        """The answer of the worker process, or how it died; and what was printed."""
        printed: list[str] = []
        self._process.start()  # anew where the threads are others
        try:
            answer = self._process.relay(
                request, payload, lambda _, text: printed.append(text)
            )
        except WorkerDiedError as error:
            return str(error), "".join(printed)
        return answer, "".join(printed)


@cache
def _node() -> NodeProcess:
    """This process's part of a node: Ray runs the tasks of a search in one that it keeps."""
    return NodeProcess()


def on_node(variables: Mapping[str, str], call: str, *arguments: Any) -> Any:
    """A task of Ray: what a method of ``NodeProcess`` gives there.

    Args:
        variables: Those of ``_THREADS`` that are set where the search runs.
        call: The method.
        arguments: Its arguments.
    """
    for name in _THREADS:  # Ray sets some, by the processors that it counts for a task
        os.environ.pop(name, None)
    os.environ.update(variables)
    return getattr(_node(), call)(*arguments)


@dataclass(slots=True)
class Files:
    """Files that travel, each put into Ray's store once, from which nodes fetch it."""

    ray: Any
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sent: dict[Path, tuple[str, list[Any]]] = field(
        default_factory=dict[Path, "tuple[str, list[Any]]"]
    )

    def digest(self, path: Path) -> str:
        """The digest of a file."""
        with self._lock:
            if path not in self._sent:
                self._sent[path] = digest(path), []
            return self._sent[path][0]

    def chunks(self, path: Path) -> Sequence[Any]:
        """References to the bytes of a file."""
        self.digest(path)
        with self._lock:
            chunks = self._sent[path][1]
            if not chunks:
                with path.open("rb") as file:
                    while chunk := file.read(_CHUNK_BYTES):
                        chunks.append(self.ray.put(chunk))
            return chunks


@dataclass(slots=True, kw_only=True)
class RayWorker(WorkerProcess):
    """A worker on one node.

    Attributes:
        ray: The library.
        task: ``on_node``, with ``options`` of a task that runs on the node.
        options: These options.
        variables: Those of ``_THREADS`` that are set here.
        node: The node's name.
        cores: The processors that the node has for Ray.
        files: What was sent.
        times: Whether the node has the resource ``timing``.
    """

    ray: Any
    task: Any
    options: Mapping[str, Any]
    variables: Mapping[str, str]
    node: str
    cores: float
    files: Files
    times: bool = False
    _running: Any = None

    def start(self) -> None:
        """Its first task starts it."""

    def end(self) -> None:
        """End what runs on the node."""
        if self._running is not None:
            self.ray.cancel(self._running, force=True)

    def relay(
        self, request: Mapping[str, Any], payload: bytes, tell: Callable[[str, str], None]
    ) -> Answer:
        """The answer of the worker on the node.

        Raises:
            NodeLostError: If the node is gone, or what runs on it.
            WorkerDiedError: If the worker process there died.
        """
        holds: Mapping[str, Any] = {"num_cpus": 1}
        if request.get("alone"):
            holds = {"num_cpus": self.cores, "resources": {_TIMING: 1}}
        self._running = self.begun("ask", dict(request), payload, **holds)
        answer, printed = self.result(self._running)
        if printed:
            tell("stdout", printed)
        if isinstance(answer, str):
            raise WorkerDiedError(answer)
        return answer

    def opening(self, opening: Opening) -> Opening:
        """The opening with the paths that its files have on the node, where they are sent."""
        files = [p for p in (opening.model, *opening.external) if p.is_file()]
        if opening.model.is_dir() or any(p.parent != opening.model.parent for p in files):
            raise UsageError(
                "a model of a folder does not travel to the nodes",
                where=str(opening.model),
                fix="give a file, with its data beside it; or --executor local",
            )
        digests = "".join(map(self.files.digest, files))
        group = hashlib.sha256(digests.encode()).hexdigest()
        model, *_ = [Path(self._sent(path, group)) for path in files]
        given = {name: getattr(opening.data, name) for name in ("data", "calib", "evaluate")}
        moved = {name: self._moved(one) for name, one in given.items() if one is not None}
        data = replace(opening.data, **moved)
        return replace(opening, model=model, data=data, folder="", environment={})

    def function(self, spec: str) -> str:
        """``FILE.py:FUNCTION`` as the node knows it."""
        return str(self._moved(spec))

    def _moved(self, given: str | Path) -> str | Path:
        """A file's path on the node; of ``FILE.py:FUNCTION`` with the function."""
        path = file_of(given)
        return self._sent(path, self.files.digest(path)) + str(given)[len(str(path)) :]

    def _sent(self, path: Path, group: str) -> str:
        """The path of a file on the node, once it is there."""
        name = f"{group[:24]}/{path.name}"
        there = self._called("has", name)
        if there:
            return there
        return self._called("put", name, self.files.digest(path), self.files.chunks(path))

    def _called(self, call: str, *arguments: Any) -> Any:
        """What a method of ``NodeProcess`` gives; raises NodeLostError."""
        return self.result(self.begun(call, *arguments, num_cpus=0))

    def begun(self, call: str, *arguments: Any, **holds: Any) -> Any:
        """A task that has begun: a method of ``NodeProcess``, which holds these resources."""
        task = self.task.options(**self.options, **holds)
        return task.remote(self.variables, call, *arguments)

    def result(self, running: Any, timeout_s: float | None = None) -> Any:
        """What a task gives.

        Raises:
            NodeLostError: If the node or its process is gone, or does not answer in time.
        """
        known = self.ray.exceptions
        try:
            return self.ray.get(running, timeout=timeout_s)
        except known.RayTaskError as error:
            raise error.cause from error
        except known.RayError as error:  # no time, no process or no node is left
            raise NodeLostError(f"was on {self.node}, which is gone") from error


def ray_workers(executor: str, progress: Progress) -> Sequence[RayWorker]:
    """A worker on each node of a cluster that computes as this machine does.

    Args:
        executor: ``ray`` for the cluster that this machine is in, or ``ray://HOST:PORT``.
        progress: Told of nodes that take no part.

    Raises:
        EngineError: If Ray is not installed, there is no cluster, or no node fits.
    """
    if importlib.util.find_spec("ray") is None:
        raise EngineError("Ray is not installed", where="--executor", fix=_INSTALL)
    ray: Any = importlib.import_module("ray")
    scheduling: Any = importlib.import_module("ray.util.scheduling_strategies")
    if not ray.is_initialized():
        address = "auto" if executor == "ray" else executor
        try:
            ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise EngineError(
                f"there is no cluster: {first_line(error)}",
                where=f"--executor {executor}",
                fix="start one: ray start --head, and ray start --address HOST:PORT elsewhere",
            ) from error
    variables = {name: os.environ[name] for name in _THREADS if name in os.environ}
    task, files = ray.remote(on_node), Files(ray)
    workers = [
        RayWorker(
            ray=ray,
            task=task,
            options={
                "scheduling_strategy": scheduling.NodeAffinitySchedulingStrategy(
                    node["NodeID"], soft=False
                )
            },
            variables=variables,
            node=f"node {node['NodeID'][:8]}",
            cores=node["Resources"]["CPU"],
            files=files,
            times=node["Resources"].get(_TIMING, 0) >= 1,
        )
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
    ]
    peers = _of_this_kind(workers, lambda text: progress(Notice(text), 1, 1))
    if not peers:
        raise EngineError(
            f"no node computes as this machine does: {', '.join(w.node for w in workers)}",
            where=f"--executor {executor}",
            fix="run finecast on a machine like the nodes, with the same libraries",
        )
    return peers


def _of_this_kind(
    workers: Sequence[RayWorker], tell: Callable[[str], None]
) -> list[RayWorker]:
    """Those on nodes whose machine and installation are those of this process."""
    own, peers = environment().as_json(), list[RayWorker]()
    begun = [worker.begun("environment", num_cpus=0) for worker in workers]
    for worker, running in zip(workers, begun, strict=True):
        with suppress(NodeLostError):
            there = worker.result(running, _STARTS_S)
            differ = [name for name in own if there.get(name) != own[name]]
            if not differ:
                peers.append(worker)
                continue
            tell(f"{worker.node} takes no part: it has another {', '.join(differ)}")
    return peers
