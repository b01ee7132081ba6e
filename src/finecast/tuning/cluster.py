"""Workers on the nodes of a Ray cluster (https://docs.ray.io), for ``--executor ray``.

Laws: a node's workers give the numbers of this machine, since nodes of another environment
take no part. Files travel once to a node, by what they hold. Where a node is lost its requests
are made again on another one: none of them changes anything but what the worker has open. This
process alone writes studies and results, and times models.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from finecast.data.sources import file_of
from finecast.errors import EngineError, UsageError
from finecast.files import digest
from finecast.measure.environment import environment
from finecast.processes.worker import Answer, WorkerDiedError
from finecast.tuning.workers import LocalWorker, NodeLostError, Opening, WorkerProcess

_CHUNK_BYTES: Final = 64 << 20
"""Of a file that travels: far below what Ray moves in one message."""
_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_STARTS_S: Final = 300.0
# What a node takes beyond the limit that an evaluation holds itself to.
_GRACE_S: Final = 60.0
_INSTALL: Final = "pip install 'finecast[cluster]', of one version on all nodes"


class OnNode:
    """What runs on a node, as an actor of Ray: a worker process, and the files it reads.

    Args:
        variables: Those of ``_THREADS`` that are set where the search runs.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        for name in _THREADS:  # Ray sets some, by the processors that it counts for an actor
            os.environ.pop(name, None)
        os.environ.update(variables)
        self._process = LocalWorker()
        self._folder = Path(tempfile.gettempdir()) / f"finecast-files-{os.getuid()}"

    def environment(self) -> dict[str, Any]:
        """The node's machine and installation."""
        return environment().as_json()

    def place(self, name: str) -> str:
        """The path of a file here."""
        return str(self._folder / name)

    def has(self, name: str) -> bool:
        """Whether a file is here."""
        return (self._folder / name).exists()

    def put(self, name: str, chunk: bytes, of: str) -> None:
        """Append to a file; where its digest is given, all of it is here and is checked.

        Raises:
            EngineError: If it is not what was sent.
        """
        place = self._folder / name
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        staged = place.with_name(f".{place.name}.{os.getpid()}")
        with staged.open("ab") as file:
            file.write(chunk)
        if not of:
            return
        if digest(staged) != of:
            staged.unlink()
            raise EngineError("a file arrived damaged", where=name, fix="run it again")
        staged.replace(place)

    def end(self) -> None:
        """End the worker process."""
        self._process.end()

    def ask(self, request: Mapping[str, Any], payload: bytes) -> tuple[Answer | str, str]:
        """The answer of the worker process, or how it died; and what was printed."""
        printed: list[str] = []
        try:
            answer = self._process.relay(
                request, payload, lambda _, text: printed.append(text)
            )
        except WorkerDiedError as error:
            return str(error), "".join(printed)
        return answer, "".join(printed)


@dataclass(slots=True, kw_only=True)
class RayWorker(WorkerProcess):
    """A worker on one node."""

    ray: Any
    actor: Any
    node: str

    def start(self) -> None:
        """It runs since it was made."""

    def end(self) -> None:
        """End the worker process on the node; the next request starts another one."""
        self._called(self.actor.end.remote())

    def leave(self) -> None:
        """End what runs on the node."""
        self.ray.kill(self.actor)

    def describes(self, own: Mapping[str, Any]) -> bool:
        """Whether the node's machine and installation are ``own``.

        Raises:
            NodeLostError: If it is gone.
        """
        return self._called(self.actor.environment.remote(), _STARTS_S) == own

    def relay(
        self, request: Mapping[str, Any], payload: bytes, tell: Callable[[str, str], None]
    ) -> Answer:
        """The answer of the worker on the node.

        Raises:
            NodeLostError: If the node or what runs on it is gone.
            WorkerDiedError: If the worker process there died.
        """
        limit = request.get("seconds")
        timeout = None if limit is None else limit + _GRACE_S
        answer, printed = self._called(self.actor.ask.remote(dict(request), payload), timeout)
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
        group = hashlib.sha256("".join(map(digest, files)).encode()).hexdigest()
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
        return self._sent(path, digest(path)) + str(given)[len(str(path)) :]

    def _sent(self, path: Path, group: str) -> str:
        """The path of a file on the node, once it is there."""
        name = f"{group[:24]}/{path.name}"
        if not self._called(self.actor.has.remote(name)):
            left = path.stat().st_size
            with path.open("rb") as file:
                while True:
                    chunk = file.read(_CHUNK_BYTES)
                    left -= len(chunk)
                    of = digest(path) if left <= 0 else ""
                    self._called(self.actor.put.remote(name, chunk, of))
                    if of:
                        break
        return str(self._called(self.actor.place.remote(name)))

    def _called(self, reference: Any, timeout: float | None = None) -> Any:
        """What a call on the node gives.

        Raises:
            NodeLostError: If the node or its actor is gone, or does not answer.
        """
        known = self.ray.exceptions
        try:
            return self.ray.get(reference, timeout=timeout)
        except (
            known.RayActorError,
            known.ActorUnschedulableError,
            known.ActorUnavailableError,
            known.GetTimeoutError,
        ) as error:
            raise NodeLostError(f"was on {self.node}, which is gone") from error


def ray_workers(executor: str) -> Sequence[RayWorker]:
    """A worker on each node of a cluster that computes as this machine does.

    Args:
        executor: ``ray`` for the cluster that this machine is in, or ``ray://HOST:PORT``.

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
                f"there is no cluster: {error}".splitlines()[0],
                where=f"--executor {executor}",
                fix="start one: ray start --head, and ray start --address HOST:PORT elsewhere",
            ) from error
    made = ray.remote(OnNode)
    variables = {name: os.environ[name] for name in _THREADS if name in os.environ}
    found, others = list[RayWorker](), list[str]()
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        strategy = scheduling.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        actor = made.options(num_cpus=1, scheduling_strategy=strategy).remote(variables)
        worker = RayWorker(ray=ray, actor=actor, node=f"node {node['NodeID'][:8]}")
        with suppress(NodeLostError):
            if worker.describes(environment().as_json()):
                found.append(worker)
                continue
        others.append(worker.node)
        worker.leave()
    if not found:
        raise EngineError(
            f"no node computes as this machine does: {', '.join(others)}",
            where=f"--executor {executor}",
            fix="run finecast on a machine like the nodes, with the same libraries",
        )
    return found
