"""Evaluations on two nodes of Ray on this machine, of which one dies."""

from __future__ import annotations

import importlib.util
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finecast
from finecast.data.options import DataOptions
from finecast.errors import EngineError, UsageError
from finecast.evaluation import workers
from finecast.native.model import ReadOptions, RunOptions
from finecast.native.onnx import read
from finecast.native.profiles import Profiles, profile_ends
from finecast.processes.worker import Answer
from finecast.rules.policy import Policy
from finecast.tuning.executor import Evaluated
from finecast.tuning.goal import Execution, TuneRequest
from tests.engines.emulator import models


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return models.mlp(tmp_path / "mlp.onnx")


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A net of which codes make the file smaller."""
    rng = np.random.default_rng(0)
    weights = {
        "v": rng.standard_normal((16, 512)).astype(np.float32),
        "w": rng.standard_normal((512, 256)).astype(np.float32) / np.float32(16),
    }
    nodes = [
        models.node("MatMul", "x v", "a"),
        models.node("Relu", "a", "b"),
        models.node("MatMul", "b w", "y"),
    ]
    return models.save(
        tmp_path / "wide.onnx", nodes, {"x": ["n", 16]}, {"y": ["n", 256]}, weights
    )


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
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Three nodes on this machine, as those of a real cluster.

    On the first one models may be timed; the third has other instructions.
    """
    pytest.importorskip("ray")
    import ray  # pyright: ignore[reportMissingImports]
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    # Beside other processes Ray's tasks get little of the processor, and end where the memory
    # is full, to begin again.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    head = {"num_cpus": 2, "resources": {"timing": 1}}
    found: Any = Cluster(initialize_head=True, head_node_args=head)
    found.second = found.add_node(num_cpus=2)
    with monkeypatch.context() as other:
        other.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        found.add_node(num_cpus=2, resources={"timing": 1})
    found.wait_for_nodes()
    ray.init(address=found.address, logging_level="ERROR", log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


Relay = Callable[[Any, Mapping[str, Any], bytes, Any], Answer]


@dataclass
class Asked:
    """What nodes were asked for."""

    evaluated: Counter[str] = field(default_factory=Counter[str])
    raced: list[str] = field(default_factory=list[str])
    told: list[str] = field(default_factory=list[str])
    after_three: Callable[[], object] = lambda: None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    from finecast_ray.cluster import RayWorker

    relay: Relay = RayWorker.relay
    seen = Asked()

    def counted(self: Any, request: Mapping[str, Any], payload: bytes, tell: Any) -> Answer:
        answer = relay(self, request, payload, tell)
        call = pickle.loads(payload)[2] if request["call"] == "on" else ""
        if call == "evaluate_part":
            seen.evaluated[self.node] += 1
            if seen.evaluated.total() == 3:  # of 8: a part is under way on either node
                seen.after_three()
        elif call == "race":
            assert request["alone"]
            seen.raced.append(self.node)
        return answer

    monkeypatch.setattr(RayWorker, "relay", counted)
    return seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray's own code
def test_a_node_is_lost_and_nothing_finished_is_done_again(
    cluster: Any, net: Path, data: DataOptions, asked: Asked
) -> None:
    kill = threading.Thread(target=cluster.remove_node, args=(cluster.second, False))
    asked.after_three = kill.start
    (local,) = evaluated(net, data, Execution())
    first, second = evaluated(net, data, Execution(executor="ray"), times=2)
    kill.join()
    assert first == second == local
    assert asked.evaluated.total() == 16
    assert min(asked.evaluated.values()) < 8 < max(asked.evaluated.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("cluster")
def test_a_search_on_a_cluster_finds_the_plan_of_this_machine(
    wide: Path,
    data: DataOptions,
    asked: Asked,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Bit for bit, where both have the same times of kernels, and bytes decide."""
    profiles = list[Profiles]()

    def once(*given: Any, **options: Any) -> Profiles:
        if not profiles:
            profiles.append(profile_ends(*given, **options))
        return profiles[0]

    monkeypatch.setattr("finecast.native.engine_subject.profile_ends", once)
    texts = list[str]()

    def told(stage: str, done: int, total: int) -> None:
        del done, total
        texts.append(str(stage))

    here, there = (
        finecast.tune(
            wide,
            tmp_path / f"{executor}.onnx",
            data=data.data,
            metric="agreement",
            batch=16,
            engine="onnxruntime",
            objective="size",
            tolerance=0.1,
            executor=executor,
            timing_cache=False,
            progress=told,
        )
        for executor in ("local", "ray")
    )
    assert here.improved
    assert there.plan.to_json() == here.plan.to_json()
    assert [t.metric for t in there.trials] == [t.metric for t in here.trials]
    assert len(asked.evaluated) == 2
    assert len(asked.raced) >= 2
    assert len(set(asked.raced)) == 1  # of two with the resource one is another machine
    (other,) = {text for text in texts if "takes no part" in text}
    assert "it has another isa_limit" in other
    assert other.partition(" takes")[0] not in [*asked.raced, *asked.evaluated]
