"""Nets trained here for seconds: their good conversions are written, whatever the inputs."""

from __future__ import annotations

import argparse
import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from pydoc_data import topics
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import finecast  # noqa: E402
from finecast.data.input_ranges import Normal, Range, Whole, input_ranges  # noqa: E402
from finecast.native.opening import opened  # noqa: E402
from finecast.native.source import NativeSource  # noqa: E402

nn: Any = torch.nn
LENGTH, SIDE = 128, 16


class Bytes(nn.Module):  # type: ignore[misc]
    """Classifies the bytes of a text by a gated convolution and its largest values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 8)
        self.features = nn.Conv1d(8, 16, 8, stride=4)
        self.gates = nn.Conv1d(8, 16, 8, stride=4)
        self.score = nn.Linear(16, 2)

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids).transpose(1, 2)
        return self.score((self.features(x) * torch.sigmoid(self.gates(x))).amax(2))


class Detector(nn.Module):  # type: ignore[misc]
    """Finds bright boxes in images of bytes, as text detectors do: a steep step at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, 2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.ConvTranspose2d(8, 8, 2, 2), nn.ReLU()),
        )
        self.map, self.threshold = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 1, 1)

    def forward(self, x: Any) -> Any:
        x = self.blocks(x)
        found = torch.sigmoid(self.map(x))
        return torch.sigmoid(50 * (found - torch.sigmoid(self.threshold(x))))


def texts() -> tuple[Any, Any]:
    """Pieces of Python's code, and of its documentation."""
    whole = inspect.getsource(argparse), "\n".join(topics.topics.values())
    cut = [text.encode()[: 100 * LENGTH] for text in whole]
    pieces = torch.tensor([[*one] for one in cut]).reshape(200, LENGTH)
    return pieces, torch.arange(200) // 100


def images() -> tuple[Any, Any]:
    """Noise of bytes with a brighter box in it, and where that is."""
    x, inside = torch.rand(64, 1, SIDE, SIDE) * 80 + 60, torch.zeros(64, 1, SIDE, SIDE)
    for k, (top, left) in enumerate(torch.randint(0, 10, (64, 2)).tolist()):
        inside[k, 0, top : top + 6, left : left + 6] = 1
    return x + 70 * inside, inside


def train(net: Any, x: Any, wanted: Any, loss: Any, steps: int) -> float:
    """Train ``net``; the last loss."""
    optimizer, found = torch.optim.Adam(net.parameters(), 2e-2), torch.tensor(0.0)
    for _ in range(steps):
        picked = torch.randint(0, len(x), (16,))
        found = loss(net(x[picked]), wanted[picked])
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
    net.eval()
    return float(found.detach())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, Any]]:
    """The nets as ``torch.onnx.export`` writes them, norms folded, with some data."""
    folder = tmp_path_factory.mktemp("trained")
    found: dict[str, tuple[Path, Any]] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, net, (x, wanted), loss, steps in (
            ("bytes", Bytes(), texts(), nn.functional.cross_entropy, 60),
            ("detector", Detector(), images(), nn.functional.binary_cross_entropy, 30),
        ):
            assert train(net, x, wanted, loss, steps) < 0.3
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                path = folder / f"{name}.onnx"
                torch.onnx.export(net, (x[:4],), str(path), input_names=["x"], dynamo=False)
            found[name] = path, x[:4].numpy()
    return found


@pytest.mark.parametrize("target", ["amx", None])
@pytest.mark.parametrize("kind", ["bytes", "detector"])
def test_good_conversions_are_written(
    kind: str,
    target: str | None,
    trained: Mapping[str, tuple[Path, Any]],
    tmp_path: Path,
) -> None:
    """On a device with bf16, and in the engine here, on random inputs and on data."""
    path, x = trained[kind]
    for data in (None, {"x": x}):
        done = finecast.convert(
            path, tmp_path / "low.onnx", "all:bf16", target=target, data=data, force=True
        )
        assert (done.verified.relative_error or 0.0) < 0.1


def ranges_of(path: Path) -> Mapping[str, Range]:
    model = opened(path)
    assert isinstance(model, NativeSource)
    return input_ranges(model.prepare_once(own=True).graph)


def test_random_inputs_look_like_those_of_training(
    trained: Mapping[str, tuple[Path, Any]],
) -> None:
    ranges = {name: ranges_of(path) for name, (path, _) in trained.items()}
    assert ranges["bytes"] == {"x": Whole(last=256)}
    found = ranges["detector"]["x"]
    assert isinstance(found, Normal)
    x = trained["detector"][1]
    assert abs(found.mean.item() - x.mean()) < x.std()
    assert 0.25 * x.std() < found.deviation.item() < 4 * x.std()
