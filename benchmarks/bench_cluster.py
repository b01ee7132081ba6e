"""Evaluations a second with 1, 2, 4 and 8 nodes of Ray, all of them on this machine.

    python -m benchmarks.bench_cluster --model resnet20.onnx --data data.npz

First the fp32 model is evaluated here, for the processor time of a sample. Then come simulated
nodes. All of finecast and of Ray is real: tasks, pickles, the plan that travels, the answers
of the size that they have, the parts that are joined. What a node computes is not: it sleeps
for as long as it takes to load the plan's model and to compute its part of the samples, since
two cores cannot compute for eight nodes. So the figures say how far the driver keeps
evaluations a second from growing with the nodes, and what it takes of a processor. The last
line computes from that what 100 nodes would take for a million samples.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import pickle
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.bench_kills import AS_OTHERS, make
from benchmarks.common import report, skip
from finecast.data.datasets import Part
from finecast.data.metrics import METRICS, Scored, Scoring
from finecast.data.options import DataOptions
from finecast.data.workload import Workload
from finecast.evaluation.workers import Opening, WorkerExecutor
from finecast.native.model import ReadOptions, RunOptions
from finecast.native.onnx import OnnxModel, read
from finecast.native.subject import Built
from finecast.planning.plan import Plan
from finecast.processes.worker import Answer
from finecast.progress import silent
from finecast.rules.policy import Policy
from finecast.tuning.executor import Evaluated
from finecast.tuning.goal import Execution, Goal
from finecast_ray.cluster import RayWorker, on_node, ray_workers

_CLASSES = 10
_STORE_BYTES = 100 << 20


@dataclass(slots=True, kw_only=True)
class Samples(Workload):
    """So many samples in batches, which nobody computes."""

    size: int
    batch: int

    @property
    def higher_is_better(self) -> bool:
        """It is."""
        return True

    @property
    def parts(self) -> int:
        """The batches."""
        return -(-self.size // self.batch)

    def evaluate(self, session: Any, reference: Any) -> float:
        """Nobody asks."""
        raise NotImplementedError

    def calibration(self) -> Sequence[Any]:
        """None."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleeper:
    """What a simulated node does in place of ``on_node``."""

    size: int
    batch: int
    sample_s: float
    load_s: float

    def __call__(self, variables: Mapping[str, str], call: str, *arguments: Any) -> Any:
        """Sleep, and answer as many bytes as a node does."""
        if call != "ask":
            return on_node(variables, call, *arguments)
        request, payload = arguments
        if request["call"] != "on":
            return ({"status": "done"}, pickle.dumps(True)), ""
        _, _, asked, given = pickle.loads(payload)
        parts = next((one.count for one in given if isinstance(one, Part)), 1)
        loaded, keeps = pickle.dumps(given[-1:]), on_node.__dict__
        if asked.startswith("evaluate") and keeps.get("loaded") != loaded:
            keeps["loaded"] = loaded  # as the process of a node keeps the model of a plan
            time.sleep(self.load_s)
        time.sleep(self.sample_s * self.size / parts)
        learned = {"samples": self.size // parts}
        found = scored(self.size // parts, self.batch)
        answers = {
            "baseline": (1.0, learned),
            "baseline_part": (found, learned),
            "evaluate": Evaluated(metric=1.0, error=0.0),
            "evaluate_part": (found, 0.0),
        }
        return ({"status": "done"}, pickle.dumps(answers[asked])), ""


def scored(samples: int, batch: int) -> Scoring:
    """What top1 keeps of so many samples."""
    found = Scoring(METRICS["top1"], [Scored(output="y")])
    outputs = np.zeros((batch, _CLASSES), np.float32)
    for start in range(0, samples, batch):
        rows = min(batch, samples - start)
        found.update({"y": outputs[:rows]}, np.zeros(rows, np.int64), None)
    return found


def sample_s(model: OnnxModel, data: Path) -> float:
    """Processor seconds that the fp32 model takes for a sample here."""
    subject = model.subject("onnxruntime", None)
    options = DataOptions(data=data, metric="agreement")
    workload = model.workload(options.loaded(), subject.reference)
    before = time.process_time()
    workload.evaluate(subject.reference, None)
    return (time.process_time() - before) / workload.samples


class Counting:
    """The bytes of requests and answers, of nodes that share it."""

    def __init__(self) -> None:
        self.out = self.back = 0


@dataclass(slots=True, kw_only=True)
class CountedWorker(RayWorker):
    """A worker whose requests and answers are counted."""

    seen: Counting

    def relay(
        self, request: Mapping[str, Any], payload: bytes, tell: Callable[[str, str], None]
    ) -> Answer:
        """As on a node."""
        answer = RayWorker.relay(self, request, payload, tell)
        self.seen.out += len(payload)
        self.seen.back += len(answer[1])
        return answer


def measure(
    opening: Opening, nodes: Sequence[CountedWorker], sleeper: Sleeper, plans: Sequence[Plan]
) -> float:
    """Report evaluations on so many nodes; returns the driver's seconds for a part."""
    executor = WorkerExecutor(opening, Execution(), nodes)
    executor.opens()
    executor.baseline(Samples(size=sleeper.size, batch=sleeper.batch))
    executor.evaluate(Built(model=None, plan=plans[0], size_bytes=0))  # all nodes are open
    (seen,) = {id(one.seen): one.seen for one in nodes}.values()
    seen.out = seen.back = 0
    took, used, count = list[float](), list[float](), len(nodes)
    for plan in plans[1:]:
        start, used_before = time.monotonic(), time.process_time()
        executor.evaluate(Built(model=None, plan=plan, size_bytes=0))
        took.append(time.monotonic() - start)
        used.append(time.process_time() - used_before)
    parts = executor.parts
    share = -(-parts // count) / parts  # the parts of the node that has most
    ideal_s = sleeper.load_s + sleeper.sample_s * sleeper.size * share
    report(
        "cluster",
        f"evaluations a second on {count} nodes",
        1 / median(took),
        "1/s",
        of_sleeps_alone=1 / ideal_s,
        seconds=median(took),
        parts=parts,
        driver_processor_s=median(used),
        bytes_out=seen.out // len(took),
        bytes_back=seen.back // len(took),
    )
    return median(used) / parts


def on_paper(nodes: int, samples: int, sleeper: Sleeper, part_s: float) -> None:
    """Report what an evaluation on many nodes takes by these figures."""
    parts = 4 * nodes
    each_s = sleeper.load_s + sleeper.sample_s * samples / nodes
    report(
        "cluster",
        f"{samples} samples on {nodes} nodes, computed",
        each_s,
        "s",
        on_one_node_s=sleeper.load_s + sleeper.sample_s * samples,
        last_part_s=sleeper.sample_s * samples / parts,
        driver_processor_s=part_s * parts,
        bytes_back=len(pickle.dumps(scored(samples // parts, sleeper.batch))) * parts,
    )


def main() -> None:
    """Print a line of JSON for each number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="default: a small net")
    parser.add_argument("--data", type=Path, help="its samples and labels")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sample-ms", type=float, help="default: as measured here")
    parser.add_argument("--load-s", type=float, default=0.5, help="to load a plan's model")
    parser.add_argument("--evaluations", type=int, default=5)
    given = parser.parse_args()
    if importlib.util.find_spec("ray") is None:
        skip("cluster", "Ray is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        if given.model is None:
            make(Path(folder))
            given.model, given.data = Path(folder, "net.onnx"), Path(folder, "x.npz")
        simulate(given)


def simulate(given: argparse.Namespace) -> None:
    """Measure one node and simulate several."""
    model = read(given.model)
    each_s = 1e-3 * given.sample_ms if given.sample_ms else sample_s(model, given.data)
    report("cluster", "processor time of a sample, fp32", 1e3 * each_s, "ms")
    policy, how = Policy.parse("all:bf16"), RunOptions(engine="onnxruntime")
    names = [*model.judge(policy, how)[1].formats][: given.evaluations + 1]
    excluded = [(re.compile(f"^{re.escape(name)}$"),) for name in names]
    plans = [model.judge(replace(policy, exclude=one), how)[1] for one in excluded]
    sleeper = Sleeper(
        size=given.samples, batch=given.batch, sample_s=each_s, load_s=given.load_s
    )
    opening = Opening(
        model=given.model,
        external=(),
        how=ReadOptions(),
        output=None,
        digest=model.digest,
        data=DataOptions(data=given.data),
        engine="onnxruntime:CPU",
        has_truth=False,
        objective=Goal().objective,
        criterion=Goal().criterion,
        folder="",
        environment={},
    )
    os.environ.update(AS_OTHERS)
    ray: Any = importlib.import_module("ray")
    cluster: Any = importlib.import_module("ray.cluster_utils").Cluster()
    for _ in range(max(given.nodes)):
        cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    try:
        seen, task = Counting(), ray.remote(lambda *asked: sleeper(*asked))
        nodes = list[CountedWorker]()
        for one in ray_workers("ray", silent):
            known: dict[str, Any] = {x.name: getattr(one, x.name) for x in fields(one)}
            known |= {"task": task, "seen": seen}
            nodes.append(CountedWorker(**known))
        part_s = [measure(opening, nodes[:n], sleeper, plans) for n in given.nodes]
        on_paper(100, 1_000_000, sleeper, part_s[-1])
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
