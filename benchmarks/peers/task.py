"""A model with its data and its metric in a folder, read with NumPy alone.

Peers run in environments of their own, so that what they share is files::

    model.onnx           the fp32 model
    task.json            metric, tolerance and what the metric needs
    calib.npz            inputs for calibration
    search.npz           inputs and truth that a tool may evaluate on
    held.npz             inputs and truth that no tool sees

In the three files the first axis of an input counts the calls of the model; the rest is one
feed. Names of what is no input begin with an underscore: ``_truth`` is the metric's. All
metrics are shares or correlations: more is better, and 1 is perfect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Feed: TypeAlias = dict[str, Array]
Run: TypeAlias = Callable[[Feed], list[Array]]
"""Runs one feed; the outputs in the order of the model."""
Part: TypeAlias = str
"""``calib``, ``search`` or ``held``."""


def top1(outputs: Array, truth: Mapping[str, Array]) -> float:
    """The share of samples whose largest output is the labelled class."""
    scores = outputs.reshape(-1, outputs.shape[-1])
    return float((scores.argmax(axis=1) == truth["_truth"].ravel()).mean())


def cosine(outputs: Array, truth: Mapping[str, Array]) -> float:
    """The mean cosine of the samples to fp32's outputs."""
    shape = (-1, int(np.prod(outputs.shape[2:])))
    low, exact = (x.astype(np.float64).reshape(shape) for x in (outputs, truth["_truth"]))
    norms = np.linalg.norm(low, axis=1) * np.linalg.norm(exact, axis=1)
    return float(((low * exact).sum(axis=1) / np.maximum(norms, 1e-30)).mean())


def pair_spearman(outputs: Array, truth: Mapping[str, Array]) -> float:
    """Rank correlation of the products of neighbouring embeddings with people's scores."""
    flat = outputs.reshape(-1, 2, outputs.shape[-1])
    found = (flat[:, 0] * flat[:, 1]).sum(axis=1)
    return float(np.corrcoef(_ranks(found), _ranks(truth["_truth"].ravel()))[0, 1])


def probe_accuracy(outputs: Array, truth: Mapping[str, Array]) -> float:
    """The share of embeddings that a linear probe puts on the labelled side."""
    flat = outputs.reshape(-1, outputs.shape[-1])
    positive = flat @ truth["_weights"] + truth["_bias"] > 0
    return float((positive == truth["_truth"].ravel()).mean())


def frame_auc(outputs: Array, truth: Mapping[str, Array]) -> float:
    """Area under the ROC of labelled frames; a negative label is none."""
    flat, labels = outputs.ravel().astype(np.float32), truth["_truth"].ravel()
    return _auc(flat[labels >= 0], labels[labels >= 0] == 1)


def pair_auc(outputs: Array, truth: Mapping[str, Array]) -> float:
    """Area under the ROC of pairs of utterances, by whether one person speaks.

    An utterance is two samples; its embedding is the mean of theirs.
    """
    means = outputs.reshape(-1, 2, outputs.shape[-1]).astype(np.float32).mean(axis=1)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    upper = np.triu_indices(len(means), 1)
    who = truth["_truth"].ravel()
    return _auc((means @ means.T)[upper], (who[:, None] == who[None])[upper])


def _ranks(values: Array) -> Array:
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[where]


def _auc(scores: Array, positive: Array) -> float:
    if not np.isfinite(scores).all():
        return 0.0
    ranks, ones = _ranks(scores), int(positive.sum())
    zeros = len(scores) - ones
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


METRICS: Final[Mapping[str, Callable[[Array, Mapping[str, Array]], float]]] = {
    metric.__name__: metric
    for metric in (top1, cosine, pair_spearman, probe_accuracy, frame_auc, pair_auc)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every tool is given.

    Attributes:
        folder: Where its files are.
        metric: A key of ``METRICS``.
        tolerance: The loss of the metric that is allowed, absolute.
        about: The model and its data in a few words.
        state: A recurrent input and the position of the output that becomes it in the next
            call; none if calls are independent.
        restart: Every so many calls the state begins with zeros.
        module: The name of the PyTorch module in ``zoo``, whose weights are ``module.pt``;
            empty if the model is a file alone.
    """

    folder: Path
    metric: str
    tolerance: float
    about: str
    state: tuple[str, int] | None = None
    restart: int = 0
    module: str = ""

    @classmethod
    def read(cls, folder: Path) -> Task:
        """The task in a folder."""
        stated = json.loads((folder / "task.json").read_text(encoding="utf-8"))
        state = stated.pop("state")
        return cls(folder=folder, state=state and (state[0], state[1]), **stated)

    def write(self, parts: Mapping[Part, Mapping[str, Array]]) -> None:
        """Write data and description; ``model.onnx`` is there. Last the description."""
        for name, arrays in parts.items():
            np.savez(self.folder / f"{name}.npz", **arrays)  # pyright: ignore[reportArgumentType]
        names = ("metric", "tolerance", "about", "state", "restart", "module")
        stated = {name: getattr(self, name) for name in names}
        (self.folder / "task.json").write_text(json.dumps(stated, indent=1), encoding="utf-8")

    @property
    def model(self) -> Path:
        """The fp32 model."""
        return self.folder / "model.onnx"

    def feeds(self, part: Part) -> list[Feed]:
        """The feeds of a part, one for each call."""
        arrays = _arrays(self.folder / f"{part}.npz")
        inputs = {name: a for name, a in arrays.items() if not name.startswith("_")}
        count = len(next(iter(inputs.values())))
        return [{name: np.asarray(a[i]) for name, a in inputs.items()} for i in range(count)]

    def truth(self, part: Part) -> Mapping[str, Array]:
        """What the metric needs beside outputs."""
        arrays = _arrays(self.folder / f"{part}.npz")
        return {name: a for name, a in arrays.items() if name.startswith("_")}

    def outputs(self, run: Run, part: Part) -> Array:
        """The first output of each call, with the state handed on."""
        made: list[Array] = []
        state: Array | None = None
        for i, feed in enumerate(self.feeds(part)):
            if self.state is None:
                made.append(run(feed)[0])
                continue
            name, position = self.state
            if state is None or i % self.restart == 0:
                state = np.zeros_like(feed[name])
            found = run(feed | {name: state})
            state = found[position].astype(np.float32).reshape(feed[name].shape)
            made.append(found[0])
        return np.stack(made)

    def score(self, run: Run, part: Part) -> float:
        """The metric of a function that runs feeds; 0 if an output is no number."""
        return self.judge(self.outputs(run, part), part)

    def judge(self, outputs: Array, part: Part) -> float:
        """The metric of all outputs of a part."""
        if not np.isfinite(outputs).all():
            return 0.0
        return METRICS[self.metric](outputs, self.truth(part))


@cache
def _arrays(path: Path) -> dict[str, Array]:
    with np.load(path) as stored:
        return dict(stored)
