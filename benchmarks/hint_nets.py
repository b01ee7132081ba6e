"""The nets on which finecast and OpenVINO's hint are compared, each with eight inputs.

Those of ``shared/models`` have real weights and data. Those of the zoo have random ones and
are exported once into a folder; the zoo's libraries are in ``.venv-zoo``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.common import shared_case
from finecast.engines.base import Array, Feeds

INPUTS: Final = 8
# Items in each input, by case. Of two cases with the same encoder one is left out, and so is a
# model that OpenVINO cannot convert (nested If).
SHARED: Final[Mapping[str, int]] = {
    "cifar10_resnet20": 16,
    "sts_minilm_l6": 4,
    "vad_silero": 1,
    "vad_silero_step_ifless": 1,
    "speaker_ge2e_lstm": 8,
}
_LENGTH: Final = 64  # that sentences are padded to
MODEL: Final = "model.onnx"
_ZOO: Final = ("torchvision", "timm", "transformers", "diffusers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """A model and its inputs."""

    model: Path
    feeds: tuple[Feeds, ...]


def known() -> tuple[str, ...]:
    """The names of the nets that are here."""
    shared = [name for name in SHARED if shared_case(name) is not None]
    if any(importlib.util.find_spec(library) is None for library in _ZOO):
        return tuple(shared)
    from zoo.networks import NETWORKS

    return (*shared, *NETWORKS)


def net(name: str, exports: Path) -> Net:
    """The net of that name; one of the zoo is exported into ``exports`` if it is not there."""
    if name in SHARED:
        return _shared(name)
    return _exported(name, exports / name)


def _shared(name: str) -> Net:
    case, items = shared_case(name), SHARED[name]
    given = list(case.calib(INPUTS * items))
    feeds = [_joined(given[at : at + items]) for at in range(0, len(given), items)]
    return Net(model=Path(case.model()), feeds=tuple(feeds))


def _joined(parts: Sequence[Feeds]) -> dict[str, Array]:
    """One call made of several; sequences of different lengths are padded with zeros."""
    if len(parts) == 1:
        return dict(parts[0])
    found: dict[str, Array] = {}
    for name in parts[0]:
        arrays = [part[name] for part in parts]
        if len({a.shape[1:] for a in arrays}) > 1:
            arrays = [np.pad(a, ((0, 0), (0, _LENGTH - a.shape[1]))) for a in arrays]
        found[name] = np.concatenate(arrays)
    return found


def _exported(name: str, folder: Path) -> Net:
    from zoo import libraries

    libraries.prepare()
    from zoo.networks import NETWORKS

    network = NETWORKS[name]
    if not folder.is_dir():
        _export(network, folder)
    drawn = [_drawn(network, seed) for seed in range(INPUTS)]
    return Net(model=folder / MODEL, feeds=tuple(drawn))


def _export(network: Any, folder: Path) -> None:
    """Write the model into ``folder``, which exists only once the model is complete."""
    from zoo import onnx_files
    from zoo.job import Job

    part = folder.with_suffix(".part")
    part.mkdir(parents=True, exist_ok=True)
    module, inputs = network.make()
    job = Job(network=network, net=module, inputs=inputs, folder=part)
    onnx_files.write(job, part / MODEL, "dynamo")
    part.rename(folder)


def _drawn(network: Any, seed: int) -> dict[str, Array]:
    """Random inputs by seed; those of seed 0 are the zoo's own."""
    import torch

    torch.manual_seed(seed)
    return {name: tensor.numpy() for name, tensor in network.inputs().items()}
