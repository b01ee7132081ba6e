"""Kills `finecast tune` by SIGKILL at random moments, and checks what is left.

    python -m benchmarks.bench_kills --kills 100 --jobs 2

Each run takes up the study of the run before. After each kill no process of it may be left, no
trial that the study had may be gone, and what lies in the folder has to be whole: a model that
loads, a plan that reads. At the end one run is left alone. It has to finish, and to evaluate
nothing that was finished before but the plan that it returns, which every run evaluates again.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from finecast.planning.plan import Plan
from finecast.tuning.study import Study

# A process that is told to end by its parent's end may take a moment.
_ENDS_S = 10.0
_MARK = "FINECAST_KILLED"
_EVAL = """
import hashlib, pathlib
import numpy as np

HERE = pathlib.Path(__file__).parent
DATA = np.load(HERE / "data.npz")

def score(run):
    (outputs,) = run({"x": DATA["x"]}).values()
    value = float((outputs.argmax(axis=1) == DATA["label"]).mean())
    with open(HERE / "evaluated", "a") as log:
        log.write(hashlib.sha256(outputs.tobytes()).hexdigest()[:16] + "\\n")
    return value
"""


@dataclass
class Killed:
    """What was seen.

    Attributes:
        kills: Runs that were killed; others had finished by then.
        finished: Runs that had finished.
        wrong: What should not have been.
        trials: Trials in the study at each kill.
    """

    kills: int = 0
    finished: int = 0
    wrong: list[str] = field(default_factory=list[str])
    trials: list[int] = field(default_factory=list[int])


def make(folder: Path, by_function: bool) -> list[str]:
    """A net and its data in ``folder``; returns the options of ``tune`` for them."""
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
    y = onnxruntime.InferenceSession(folder / "net.onnx").run(None, {"x": x})[0]
    np.savez(folder / "data.npz", x=x, label=np.asarray(y).argmax(axis=1))
    (folder / "mine.py").write_text(_EVAL)
    if by_function:
        return ["--eval", f"{folder}/mine.py:score"]
    return ["--data", f"{folder}/data.npz", "--metric", "top1"]


def run(folder: Path, options: Sequence[str], jobs: int, mark: str) -> subprocess.Popen[str]:
    """`finecast tune`, in whose processes the environment has ``mark``."""
    command = [sys.executable, "-m", "finecast", "tune", f"{folder}/net.onnx", *options]
    command += ["-o", f"{folder}/low.onnx", "--jobs", str(jobs), "--force", "--resume"]
    command += ["--tolerance", "0.002", "--max-trials", "6", "--engine", "openvino"]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, _MARK: mark},
    )


def left_running(mark: str) -> list[int]:
    """Processes whose environment has ``mark``, once they had time to end."""
    end = time.monotonic() + _ENDS_S
    while (found := [*_marked(mark)]) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def _marked(mark: str) -> Iterator[int]:
    wanted = f"{_MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)
        except OSError:  # it has just ended, or is another user's
            continue


def keys_of(study: Path) -> set[tuple[str, ...]]:
    """What identifies each trial; empty if there is no study."""
    if not study.exists():
        return set()
    with Study(study)._connection() as db:  # pyright: ignore[reportPrivateUsage]
        found = db.execute("SELECT model, plan, engine, data, metric FROM trials")
        return {tuple(map(str, row)) for row in found}


def check_files(folder: Path) -> Iterator[str]:
    """Files of the output's names that are not whole."""
    try:
        if (folder / "low.onnx").exists():
            onnxruntime.InferenceSession(folder / "low.onnx")
        if (folder / "low.plan.json").exists():
            Plan.load(folder / "low.plan.json")
    except Exception as error:  # whatever is wrong with them
        yield f"{type(error).__name__}: {error}"


def kill_often(folder: Path, kills: int, jobs: int, seed: int, by_function: bool) -> Killed:
    """Kill ``kills`` runs; returns what was seen."""
    options, chance, seen = make(folder, by_function), random.Random(seed), Killed()
    study, before = folder / "low.study.db", set[tuple[str, ...]]()
    start = time.monotonic()
    alone = run(folder, options, jobs, "alone")
    alone.communicate(timeout=900)
    whole_s = time.monotonic() - start
    for path in (study, folder / "low.onnx", folder / "low.plan.json", folder / "evaluated"):
        path.unlink(missing_ok=True)
    print(f"a run alone takes {whole_s:.1f} s", flush=True)
    while seen.kills < kills:
        mark = uuid.uuid4().hex
        process = run(folder, options, jobs, mark)
        try:
            process.communicate(timeout=chance.uniform(0.0, whole_s))
            seen.finished += 1
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            seen.kills += 1
        seen.wrong += [f"process {number} is left" for number in left_running(mark)]
        seen.wrong += check_files(folder)
        now = keys_of(study)
        seen.wrong += [f"trial {key} is lost" for key in before - now]
        seen.trials.append(len(now))
        before = now
        wrong = "; ".join(seen.wrong)
        print(f"{seen.kills} killed, {len(now)} trials, wrong: {wrong or 'no'}", flush=True)
    log = folder / "evaluated"
    known = log.read_text().split() if log.exists() else list[str]()
    text = run(folder, options, jobs, "last")
    out, _ = text.communicate(timeout=900)
    if text.returncode not in (0, 1):
        seen.wrong.append(f"the last run ended with {text.returncode}: {out}")
    if by_function:
        last = Counter(log.read_text().split()[len(known) :])
        again = [digest for digest in last if digest in known]
        print(f"the last run evaluated {last.total()}, {len(again)} of them not first")
    left = [p.name for p in folder.iterdir() if p.name.startswith(".finecast-")]
    seen.wrong += [f"{name} is left" for name in left]
    print(out)
    return seen


def main() -> None:
    """Kill, print and exit with 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval", action="store_true", help="by a user's function")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen = kill_often(Path(folder), given.kills, given.jobs, given.seed, given.eval)
    print(f"{seen.kills} killed, {seen.finished} had finished; trials kept: {seen.trials}")
    print("\n".join(seen.wrong) or "nothing lost, nothing half-written, no process left")
    sys.exit(1 if seen.wrong else 0)


if __name__ == "__main__":
    main()
