"""Evaluations on two nodes of Ray on this machine, of which one dies."""

from __future__ import annotations

import importlib.util
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finecast.data.sources import DataOptions
from finecast.errors import EngineError, UsageError
from finecast.native.model import ReadOptions, RunOptions
from finecast.native.onnx import read
from finecast.processes.worker import Answer
from finecast.rules.policy import Policy
from finecast.tuning import workers
from finecast.tuning.executor import Evaluated
from finecast.tuning.goal import Execution, TuneRequest
from tests.engines.emulator import models


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return models.mlp(tmp_path / "mlp.onnx")


@pytest.fixture
def data(tmp_path: Path) -> DataOptions:
    x = np.random.default_rng(1).standard_normal((400, 16)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    return DataOptions(data=tmp_path / "data.npz", metric="agreement", batch=16)


def evaluated(
    net: Path, data: DataOptions, execution: Execution, times: int = 1
) -> list[Evaluated]:
    model, found = read(net), list[Evaluated]()
    request = TuneRequest(data=data, execution=execution)
    plan = model.judge(Policy.parse("all:bf16"), RunOptions(engine="onnxruntime"))[1]
    with workers.evaluating(model, ReadOptions(), None, request) as executor_of:
        subject = model.subject("onnxruntime", None)
        executor = executor_of(subject)
        assert executor is not None
        executor.baseline(model.workload(executor.data(), subject.reference))
        for _ in range(times):
            found.append(executor.evaluate(subject.model.build(plan)))
    return found


def test_what_is_no_executor() -> None:
    with pytest.raises(UsageError, match="'slurm' is nothing that evaluates"):
        Execution(executor="slurm")


def test_objects_do_not_travel(net: Path) -> None:
    data = DataOptions(data={"x": np.zeros((4, 16), np.float32)})
    with pytest.raises(UsageError, match="read by path"):
        evaluated(net, data, Execution(executor="ray"))


def test_without_ray(net: Path, data: DataOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "ray" else found(name)
    )
    with pytest.raises(EngineError, match="Ray is not installed"):
        evaluated(net, data, Execution(executor="ray"))


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes on this machine, as two of a real cluster."""
    pytest.importorskip("ray")
    import ray  # pyright: ignore[reportMissingImports]
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    found: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    found.second = found.add_node(num_cpus=2)
    found.wait_for_nodes()
    ray.init(address=found.address, logging_level="ERROR", log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


Relay = Callable[[Any, Mapping[str, Any], bytes, Any], Answer]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray's own code
def test_a_node_is_lost_and_nothing_finished_is_done_again(
    cluster: Any, net: Path, data: DataOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finecast.tuning.cluster import RayWorker

    relay: Relay = RayWorker.relay
    done = Counter[str]()
    asked: list[threading.Thread] = []

    def counted(self: Any, request: Mapping[str, Any], payload: bytes, tell: Any) -> Answer:
        answer = relay(self, request, payload, tell)
        if request["call"] == "evaluate_part":
            done[self.node] += 1
            if done.total() == 3:  # of 8: a part is under way on either node
                kill = threading.Thread(
                    target=cluster.remove_node, args=(cluster.second, False)
                )
                kill.start()
                asked.append(kill)
        return answer

    (local,) = evaluated(net, data, Execution())
    monkeypatch.setattr(RayWorker, "relay", counted)
    first, second = evaluated(net, data, Execution(executor="ray"), times=2)
    for one in asked:
        one.join()
    assert first == second == local
    assert done.total() == 16
    assert min(done.values()) < 8 < max(done.values())
