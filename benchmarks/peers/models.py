"""The models that tools are compared on, each written once as a task in a folder of its own.

Real models with labelled data (``shared/models``), architectures of other libraries with
random weights (``zoo``), and synthetic ones with planted sensitive ops. Where there are no
labels, the truth is what the fp32 model decides in ONNX Runtime.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import onnxruntime

from benchmarks.common import shared_case
from benchmarks.peers import synthetic
from benchmarks.peers.lot import PREFIX
from benchmarks.peers.task import Array, Part, Task
from zoo.networks import NETWORKS

Parts: TypeAlias = Mapping[Part, Mapping[str, Array]]
# A tenth of a percent would be within the noise of a few hundred labels; half a percent of a
# correlation or an area is what users of such models still notice.
_OF_LABELS, _OF_RANKS = 0.01, 0.005
_LENGTH: Final = 64  # of a sentence, in tokens; none of the data is longer
# Calls of models with random weights: for calibration, and for searches; others are held.
_CALIBRATED: Final = 10
_SEARCHED: Final = 15
_ROOT: Final = Path(__file__).resolve().parents[2]


class AbsentError(Exception):
    """A model whose files or library are not here."""


def _stored(case: Any) -> Mapping[str, Array]:
    with np.load(Path(case.model()).with_name("data.npz")) as data:
        return dict(data)


def _calls(array: Array, batch: int) -> Array:
    """Samples as calls of ``batch`` each; what is left over is dropped."""
    count = len(array) // batch
    return array[: count * batch].reshape(count, batch, *array.shape[1:])


def _classes(case: Any, folder: Path) -> tuple[Task, Parts]:
    data, batch = _stored(case), 20
    # Both halves have images of each class alike: the order of the data is by chance.
    parts: dict[Part, Mapping[str, Array]] = {
        "calib": {"input": _calls(case._n(data["calib_x"][:200]), batch)}
    }
    for part, chosen in (("search", slice(0, 1000)), ("held", slice(1000, 2000))):
        parts[part] = {
            "input": _calls(case._n(data["test_x"][chosen]), batch),
            "_truth": data["test_y"][chosen],
        }
    about = "ResNet-20, CIFAR-10, batch 20"
    return Task(folder=folder, metric="top1", tolerance=_OF_LABELS, about=about), parts


def _tokens(ids: Array, lengths: Array, batch: int = 16) -> dict[str, Array]:
    count, given = ids.shape
    rows = np.zeros((count, _LENGTH), np.int64)
    rows[:, :given] = ids[:, :_LENGTH]
    mask = (np.arange(_LENGTH) < lengths[:, None]).astype(np.int64)
    named = {
        "input_ids": rows * mask,
        "attention_mask": mask,
        "token_type_ids": np.zeros_like(rows),
    }
    return {name: _calls(array, batch) for name, array in named.items()}


def _sentences(case: Any, folder: Path, *, pairs: bool) -> tuple[Task, Parts]:
    data = _stored(case)
    drawn = np.random.default_rng(0)
    parts: dict[Part, Mapping[str, Array]] = {
        "calib": _tokens(data["calib"][:208], data["calib_len"][:208])
    }
    if pairs:
        order = drawn.permutation(len(data["sts_score"]))
        for part, k in (("search", order[:192]), ("held", order[192:576])):
            pair = [
                np.pad(data[name][k], ((0, 0), (0, _LENGTH - data[name].shape[1])))
                for name in ("sts_a", "sts_b")
            ]
            lengths = np.stack([data["sts_a_len"][k], data["sts_b_len"][k]], axis=1)
            ids = np.stack(pair, axis=1).reshape(-1, _LENGTH)
            parts[part] = {
                **_tokens(ids, lengths.ravel()),
                "_truth": data["sts_score"][k],
            }
        about, metric, loss = "MiniLM-L6, STS-2015, 16 x 64", "pair_spearman", _OF_RANKS
    else:
        order = drawn.permutation(len(data["sst2_y"]))
        for part, k in (("search", order[:384]), ("held", order[384:1152])):
            parts[part] = {
                **_tokens(data["sst2_test"][k], data["sst2_test_len"][k]),
                "_truth": data["sst2_y"][k],
                "_weights": data["sst2_w"],
                "_bias": data["sst2_b"],
            }
        about, metric, loss = "MiniLM-L6 with a probe, SST-2, 16 x 64", "probe_accuracy", 0.01
    return Task(folder=folder, metric=metric, tolerance=loss, about=about), parts


def _clips(case: Any, folder: Path) -> tuple[Task, Parts]:
    """A voice detector that is given whole clips."""
    audio, labels = case._d()
    feeds = [case._feed(clip) for clip in audio]
    arrays = {name: np.stack([f[name] for f in feeds]) for name in feeds[0]}
    parts = {
        part: {name: a[k] for name, a in arrays.items()} | {"_truth": labels[k]}
        for part, k in _CLIPS.items()
    }
    about = "voice detector, clips of 8 s"
    return Task(folder=folder, metric="frame_auc", tolerance=_OF_RANKS, about=about), parts


_CLIPS: Final[Mapping[Part, slice]] = {
    "calib": slice(0, 6),
    "search": slice(6, 18),
    "held": slice(18, 36),
}


def _frames(case: Any, folder: Path, *, about: str) -> tuple[Task, Parts]:
    """The same, frame by frame: its state is an output and the next call's input."""
    audio, labels = case._d()
    session = onnxruntime.InferenceSession(case.model())
    parts: dict[Part, Mapping[str, Array]] = {}
    for part, k in _CLIPS.items():
        inputs: list[Array] = []
        states: list[Array] = []

        def keep(feed: Any, own: list[Array] = inputs, old: list[Array] = states) -> Any:
            own.append(feed["input"])
            old.append(feed["state"])
            return session.run(None, feed)

        # States of the fp32 model: calibration needs their ranges. Scores hand on their own.
        for clip in audio[k]:
            case._steps(clip, keep)
        every = slice(None, None, 7) if part == "calib" else slice(None)
        found = {"input": np.stack(inputs)[every], "state": np.stack(states)[every]}
        count = len(found["input"])
        parts[part] = {**found, "sr": np.full(count, 16000, np.int64), "_truth": labels[k]}
    task = Task(
        folder=folder, metric="frame_auc", tolerance=_OF_RANKS, about=about,
        state=("state", 1), restart=case.NF,
    )  # fmt: skip
    return task, parts


def _speakers(case: Any, folder: Path) -> tuple[Task, Parts]:
    data, batch = _stored(case), 10
    parts: dict[Part, Mapping[str, Array]] = {
        "calib": {"mel": _calls(data["calib_mel"], batch)}
    }
    for part, first in (("search", 0), ("held", 1)):
        mel = data["mel"][first::2]
        parts[part] = {
            "mel": _calls(mel.reshape(-1, *mel.shape[2:]), batch),
            "_truth": data["speaker"][first::2],
        }
    about = "speaker encoder (LSTM), batch 10"
    return Task(folder=folder, metric="pair_auc", tolerance=_OF_RANKS, about=about), parts


_Prepare: TypeAlias = Callable[[Any, Path], tuple[Task, Parts]]
_SHARED: Final[Mapping[str, _Prepare]] = {
    "cifar10_resnet20": _classes,
    "sts_minilm_l6": partial(_sentences, pairs=True),
    "sst2_minilm_l6": partial(_sentences, pairs=False),
    "vad_silero": _clips,
    "vad_silero_step_if": partial(_frames, about="voice detector by frames, nested If"),
    "vad_silero_step_ifless": partial(_frames, about="voice detector by frames"),
    "speaker_ge2e_lstm": _speakers,
}


def _shared(name: str, folder: Path, zoo: Path) -> tuple[Task, Parts]:
    del zoo
    case = shared_case(name)
    if case is None:
        raise AbsentError("the shared models are not here (FINECAST_MODELS)")
    (folder / "model.onnx").write_bytes(Path(case.model()).read_bytes())
    return _SHARED[name](case, folder)


def _exported(module: str, name: str, folder: Path, zoo: Path) -> Mapping[str, Array]:
    """The inputs of a model that a module writes, in an interpreter that has its library."""
    if not zoo.is_file():
        raise AbsentError(f"{zoo} is not there: make zoo, or name another by --zoo")
    done = subprocess.run(
        [zoo, "-m", module, name, folder],
        cwd=_ROOT, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    if done.returncode:
        raise AbsentError((done.stderr.strip().splitlines() or ["no reason"])[-1][:300])
    with np.load(folder / "inputs.npz") as drawn:
        return dict(drawn)


def _of_library(name: str, folder: Path, zoo: Path) -> tuple[Task, Parts]:
    """An architecture that its library builds and exports, in an interpreter that has it."""
    inputs = _exported("benchmarks.peers.zoo", name, folder, zoo)
    about = f"{name} (random weights), batch {len(next(iter(inputs.values()))[0])}"
    task = Task(folder=folder, metric="top1", tolerance=0.02, about=about, module=name)
    return task, _decided(task, inputs)


def _of_zoo(name: str, folder: Path, zoo: Path) -> tuple[Task, Parts]:
    """A network of the zoo, judged by which number of a row is the largest, or by cosines."""
    inputs = _exported("benchmarks.peers.lot", name, folder, zoo)
    calls, batch = (len(next(iter(inputs.values()))), len(next(iter(inputs.values()))[0]))
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    feed = {name: array[0] for name, array in inputs.items()}
    is_map = np.asarray(session.run(None, feed)[0]).ndim > 3
    about = f"{name.removeprefix(PREFIX)} of the zoo, {calls * batch:,} samples, batch {batch}"
    metric, loss = ("cosine", 0.001) if is_map else ("top1", 0.02)
    task = Task(folder=folder, metric=metric, tolerance=loss, about=about)
    return task, _decided(task, inputs)


def _synthetic(count: int, folder: Path, zoo: Path) -> tuple[Task, Parts]:
    del zoo
    inputs, sensitive = synthetic.write(count, folder / "model.onnx")
    about = f"synthetic, {count:,} ops, {sensitive} sensitive"
    task = Task(folder=folder, metric="top1", tolerance=0.02, about=about)
    return task, _decided(task, {"x": inputs})


def _decided(task: Task, inputs: Mapping[str, Array]) -> Parts:
    """Calls split into the three parts, with what the fp32 model gives or chooses.

    All calls beyond the first two parts are held. Random weights have many scores that nearly
    tie: of some 2,000 samples a loss of 2% is known to .3%.
    """
    session = onnxruntime.InferenceSession(task.model)
    ends = (_CALIBRATED, _CALIBRATED + _SEARCHED, len(next(iter(inputs.values()))))
    parts: dict[Part, Mapping[str, Array]] = {}
    begin = 0
    for part, end in zip(("calib", "search", "held"), ends, strict=True):
        given = {name: array[begin:end] for name, array in inputs.items()}
        outputs = [
            np.asarray(session.run(None, {name: a[i] for name, a in given.items()})[0])
            for i in range(end - begin)
        ]
        truth = np.stack(outputs)
        decided = truth if task.metric == "cosine" else truth.argmax(axis=-1)
        parts[part] = {**given, "_truth": decided}
        begin = end
    return parts


MODELS: Final[Mapping[str, Callable[[Path, Path], tuple[Task, Parts]]]] = {
    **{name: partial(_shared, name) for name in _SHARED},
    **{
        name: partial(_of_library, name)
        for name in ("efficientnet_lite0", "resnet18", "convnext_atto", "vit_tiny", "bert")
    },
    **{PREFIX + name: partial(_of_zoo, PREFIX + name) for name in NETWORKS},
    "synthetic_1000": partial(_synthetic, 1000),
    "synthetic_5000": partial(_synthetic, 5000),
}
FIXED: Final = tuple(name for name in MODELS if not name.startswith(PREFIX))
"""Models of the page; those of the zoo are drawn by lot."""


def prepared(name: str, folder: Path, zoo: Path) -> Task:
    """The task of a model, written unless it is there.

    Args:
        name: A key of ``MODELS``.
        folder: Where the tasks' folders are.
        zoo: An interpreter with timm and transformers.

    Raises:
        AbsentError: If its files or library are not here.
    """
    place = folder / name
    if not (place / "task.json").is_file():
        sys.stderr.write(f"preparing {name}\n")
        place.mkdir(parents=True, exist_ok=True)
        task, parts = MODELS[name](place, zoo)
        task.write(parts)
    return Task.read(place)
