"""Kills `finecast tune` by SIGKILL at random moments, and checks what is left.

    python -m benchmarks.bench_kills /tmp/kills --kills 100 --jobs 2
    python -m benchmarks.bench_kills /tmp/kills-eval --kills 100 --jobs 2 --eval
    python -m benchmarks.bench_kills /tmp/kills-ray --kills 20 --ray      # Ray is installed

Each run takes up the study of the run before. After a run that finished a new study begins,
and after most that were killed once they had all trials.
After each run

- no process of it is left, on a node of the cluster neither;
- no trial that the study had is gone or another one;
- what lies in the folder is whole: a model that loads, a plan and a lock that read;
- with `--eval`, whose function logs each evaluation: whatever was evaluated is in the study,
  but for the last one, and nothing of the study was evaluated again but the plan that a run
  returns, which each run evaluates itself;
- if it finished, nothing that killed runs staged is left.

What was seen of each run is a line of runs.jsonl in the folder. The same command again goes on
where it was stopped. The model is chosen by its size: that takes seconds instead of minutes,
as no race has to be settled on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from finecast.measure.study import Study
from finecast.planning.plan import Plan

# A process that is told to end by its parent's end may take a moment; a node of Ray has to
# see first that the search is gone.
_ENDS_S = 10.0
_CLUSTER_ENDS_S = 60.0
_STARTS_S = 120.0
# The fp32 model's value comes first in each run: of its outputs, of the same ones again, and
# of others, on which the value has to differ (data/evaluation.py). None of them is a trial.
_OF_FP32 = 3
# The share of kills after which a study that has all its trials is left for a new one.
_ANEW = 0.7
# About what one trial takes.
_TRIAL_S = 0.3
# Beside other processes Ray gives its tasks the least of the processor (a niceness of 15), and
# ends them where the memory is full, to begin them again.
AS_OTHERS = {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
_MARK, _CLUSTER_MARK = "FINECAST_KILLED", "FINECAST_KILLED_ON"
_OUTPUTS = ("low.onnx", "low.plan.json", "low.lock.json")
_EVAL = """
import pathlib
import numpy as np

HERE = pathlib.Path(__file__).parent
DATA = np.load(HERE / "data.npz")

def score(run):
    (outputs,) = run({"x": DATA["x"]}).values()
    value = 1 - float(np.abs(outputs.astype(np.float64) - DATA["y"]).mean())
    with open(FOLDER / "evaluated", "a") as log:
        log.write(repr(value) + "\\n")
    return value
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was seen of a run.

    Attributes:
        after_s: When it was killed; None if it had finished before.
        from_trials: After how many trials of its study these seconds began; 0 for its start.
        lasted_s: Seconds from its start to its end.
        trials: Trials in the study after it.
        evaluated: Evaluations of the user's function; None if it has none.
        again: Those of plans that the study had.
        wrong: What should not have been.
    """

    after_s: float | None
    lasted_s: float
    trials: int
    evaluated: int | None
    again: int
    from_trials: int = 0
    wrong: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The command that is killed."""

    folder: Path
    options: Sequence[str]
    environment: Mapping[str, str]
    cluster: str

    @property
    def study(self) -> Path:
        """The study."""
        return self.folder / "low.study.db"

    def start(self, mark: str) -> subprocess.Popen[bytes]:
        """`finecast tune`, in whose processes the environment has ``mark``."""
        command = [sys.executable, "-m", "finecast", "tune", str(self.folder / "net.onnx")]
        command += ["-o", str(self.folder / "low.onnx"), "--force", "--resume"]
        command += ["--max-trials", "6", "--engine", "onnxruntime", "--objective", "size"]
        with (self.folder / "said").open("wb") as said:
            return subprocess.Popen(
                [*command, *self.options],
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment, _MARK: mark},
            )

    def anew(self) -> None:
        """Remove what runs have written."""
        for name in (*_OUTPUTS, "low.study.db", "low.study.db-journal", "evaluated"):
            (self.folder / name).unlink(missing_ok=True)

    def trials(self) -> dict[tuple[str, ...], float]:
        """The metric of each trial by what identifies the trial; empty without a study."""
        if not self.study.exists():
            return {}
        with Study(self.study)._connection() as db:  # pyright: ignore[reportPrivateUsage]
            found = db.execute("SELECT metric, model, plan, engine, data FROM trials")
            return {tuple(map(str, key)): float(metric) for metric, *key in found}

    def evaluated(self) -> list[float]:
        """What the user's function has returned so far."""
        log = self.folder / "evaluated"
        return [float(line) for line in log.read_text().split()] if log.exists() else []


def make(folder: Path) -> None:
    """Write a net, its data and a function that scores it."""
    rng = np.random.default_rng(0)
    sizes = (64, 512, 512, 8)
    nodes, weights, last = list[onnx.NodeProto](), list[onnx.TensorProto](), "x"
    for i, shape in enumerate(pairwise(sizes)):
        array = (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)
        weights.append(onnx.numpy_helper.from_array(array, f"w{i}"))
        nodes.append(onnx.helper.make_node("MatMul", [last, f"w{i}"], [f"m{i}"], f"m{i}"))
        nodes.append(onnx.helper.make_node("Tanh", [f"m{i}"], [f"t{i}"], f"t{i}"))
        last = f"t{i}"
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", size])
        for name, size in (("x", sizes[0]), (last, sizes[-1]))
    ]
    graph = onnx.helper.make_graph(nodes, "net", ends[:1], ends[1:], weights)
    opset = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)
    onnx.save(model, folder / "net.onnx")
    x = rng.standard_normal((512, 64)).astype(np.float32)
    (y,) = onnxruntime.InferenceSession(folder / "net.onnx").run(None, {"x": x})
    np.savez(folder / "x.npz", x=x)
    np.savez(folder / "data.npz", x=x, y=np.asarray(y))
    (folder / "mine.py").write_text(_EVAL.replace("FOLDER", f"pathlib.Path({str(folder)!r})"))


def left_running(job: Job, mark: str) -> list[str]:
    """Processes of a run, here and on the cluster, once they had time to end."""
    end = time.monotonic() + (_CLUSTER_ENDS_S if job.cluster else _ENDS_S)
    while (found := [*_left(job, mark)]) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def _left(job: Job, mark: str) -> Iterator[str]:
    """Processes with the mark, and those of nodes that do something for finecast."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is another user's
            variables = (path / "environ").read_bytes().split(b"\0")
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            working = "worker_process.py" in command or "on_node" in command
            if f"{_MARK}={mark}".encode() in variables or (
                job.cluster
                and f"{_CLUSTER_MARK}={job.cluster}".encode() in variables
                and working
            ):
                yield f"process {path.name} is left: {command}"


def check_files(folder: Path) -> Iterator[str]:
    """Files of the output's names that are not whole."""
    model, plan, lock = (folder / name for name in _OUTPUTS)
    try:
        if model.exists():
            onnxruntime.InferenceSession(model)
        if plan.exists():
            Plan.load(plan)
        if lock.exists():
            json.loads(lock.read_text())
    except Exception as error:  # whatever is wrong with them
        yield f"{type(error).__name__}: {error}"


def killed(job: Job, after_s: float | None, from_trials: int = 0) -> Run:
    """Run the job and kill it, unless it has finished by then; check what is left.

    The seconds begin once the study has ``from_trials`` trials.
    """
    before, known, mark = job.trials(), job.evaluated(), uuid.uuid4().hex
    start = time.monotonic()
    process = job.start(mark)
    while process.poll() is None and len(job.trials()) < from_trials:
        time.sleep(0.01)
    try:
        process.wait(timeout=900 if after_s is None else after_s)
        finished = True
    except subprocess.TimeoutExpired:
        finished = False
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    lasted_s = time.monotonic() - start
    wrong = [*left_running(job, mark), *check_files(job.folder)]
    if finished and process.returncode not in (0, 1):
        said = (job.folder / "said").read_text()
        wrong.append(f"a run ended with {process.returncode}: {said}")
    if finished:
        names = [one.name for one in job.folder.iterdir()]
        wrong += [f"{name} is left" for name in names if name.startswith(".finecast-")]
    now = job.trials()
    wrong += [f"trial {key} is lost" for key in before.keys() - now.keys()]
    wrong += [f"trial {key} is another one" for key in before if before[key] != now.get(key)]
    done = job.evaluated()[len(known) + _OF_FP32 :]
    again = [value for value in done if value in before.values()]
    wrong += [f"{n} times {value} in one run" for value, n in Counter(done).items() if n > 1]
    if len(again) > 1:
        wrong.append(f"evaluated again: {again}, of {[*before.values()]}")
    lost = [value for value in done[:-1] if value not in now.values()]
    wrong += [f"the evaluation {value} is not in the study" for value in lost]
    return Run(
        after_s=None if finished else after_s,
        lasted_s=lasted_s,
        trials=len(now),
        evaluated=len(done) if "--eval" in job.options else None,
        again=len(again),
        from_trials=from_trials,
        wrong=wrong,
    )


@contextmanager
def cluster(mark: str, nodes: int = 2) -> Generator[str]:
    """The address of a Ray cluster of nodes on this machine, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray = str(Path(sys.executable).with_name("ray"))
    address = f"127.0.0.1:{port}"
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))

        def start(*options: str) -> None:
            node = subprocess.Popen(
                [ray, "start", "--block", "--num-cpus=2", *options],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **AS_OTHERS, _CLUSTER_MARK: mark},
            )
            stack.callback(node.wait)
            stack.callback(node.terminate)

        head = (f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}")
        start("--head", *head, '--resources={"timing": 1}')
        there = {**os.environ, "RAY_ADDRESS": address}
        end = time.monotonic() + _STARTS_S
        for wanted in range(1, nodes + 1):
            while _nodes(ray, there) < wanted:
                if time.monotonic() > end:
                    raise TimeoutError(f"node {wanted} of Ray did not start")
                time.sleep(1)
            if wanted < nodes:
                start(f"--address={address}")
        yield address


def _nodes(ray: str, there: Mapping[str, str]) -> int:
    """The number of nodes that a cluster has by now."""
    status = subprocess.run([ray, "status"], env=there, capture_output=True, text=True)
    return status.stdout.count(" node_")


def kill_often(job: Job, kills: int, seed: int) -> list[Run]:
    """Kill runs until ``kills`` of them were, and let one finish; returns what was seen."""
    record = job.folder / "runs.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    runs = [Run(**json.loads(line)) for line in lines]

    def seen(run: Run) -> Run:
        runs.append(run)
        with record.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")
        how = "finished" if run.after_s is None else f"killed after {run.after_s:.1f} s"
        count = sum(one.after_s is not None for one in runs)
        print(f"{count}: {how}, {run.trials} trials, {run.wrong or 'as it should be'}")
        sys.stdout.flush()
        return run

    if not runs:
        job.anew()
        seen(killed(job, None))
    while sum(run.after_s is not None for run in runs) < kills:
        # How long a run takes changes with what else the machine does.
        whole_s = float(np.mean([r.lasted_s for r in runs if r.after_s is None][-3:]))
        chance = random.Random(f"{seed}, {len(runs)}")
        complete = len(job.trials()) >= runs[0].trials
        if runs[-1].after_s is None or (complete and chance.random() < _ANEW):
            job.anew()
        # A run starts and observes for most of its time: half of the kills are near a trial.
        kept = len(job.trials())
        if len(runs) % 2 and kept < runs[0].trials:
            trials = chance.randint(kept + 1, runs[0].trials)
            seen(killed(job, chance.expovariate(1 / _TRIAL_S), trials))
        else:
            seen(killed(job, chance.uniform(0.0, whole_s)))
    if runs[-1].after_s is not None:
        seen(killed(job, None))
    return runs


def main() -> None:
    """Kill, print and exit with 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/kills"))
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval", action="store_true", help="by a user's function")
    parser.add_argument("--ray", action="store_true", help="on two nodes of Ray, here")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    make(folder)
    data = ["--data", f"{folder}/x.npz", "--metric", "agreement", "--tolerance", "0.004"]
    if given.eval:
        data = ["--eval", f"{folder}/mine.py:score", "--tolerance", "0.004"]
        data += ["--calib", f"{folder}/x.npz"]
    mark = uuid.uuid4().hex if given.ray else ""
    with ExitStack() as stack:
        where, there = ["--jobs", str(given.jobs)], dict[str, str]()
        if given.ray:
            address = stack.enter_context(cluster(mark))
            where, there = ["--executor", "ray"], {"RAY_ADDRESS": address}
        job = Job(folder=folder, options=[*data, *where], environment=there, cluster=mark)
        runs = kill_often(job, given.kills, given.seed)
    wrong = [text for run in runs for text in run.wrong]
    count = sum(run.after_s is not None for run in runs)
    print(f"{count} killed, {len(runs) - count} finished")
    if given.eval:
        evaluated = sum(run.evaluated or 0 for run in runs)
        print(f"{evaluated} evaluations, {sum(run.again for run in runs)} of plans returned")
    print("\n".join(wrong) or "nothing lost, nothing half-written, no process left")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
