"""Two small tasks to train on: characters of a text, and images of clothes or digits.

Both are there without a download: Debian's licences (or Python's own sources), and Debian's
package ``dataset-fashion-mnist`` (or scikit-learn's digits).
"""

from __future__ import annotations

import gzip
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from benchmarks.torch_nets import Bert

LICENCES: Final = Path("/usr/share/common-licenses")
FASHION: Final = Path("/usr/share/datasets/fashion-mnist")
TOKENS: Final = 64

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A net with its loss, and a function that draws batches by a seed."""

    name: str
    net: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    learning_rate: float


class CharacterModel(nn.Module):
    """A transformer of two layers that fills in the blanks of a text."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.body = Bert(2, vocabulary + 1, width=128, heads=4, dropout=0.1, head=True)

    def forward(self, shown: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Cross entropy at the blanks; ``wanted`` is -100 elsewhere."""
        return F.cross_entropy(self.body(shown).flatten(0, 1), wanted.flatten())


class ImageModel(nn.Module):
    """Three convolutions with batch norm, and the loss of the class."""

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for before, after, stride in ((1, 16, 2), (16, 32, 2), (32, 64, 2)):
            blocks += [
                nn.Conv2d(before, after, 3, stride, 1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(inplace=True),
            ]
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """Cross entropy of ``classes``."""
        return F.cross_entropy(self.head(self.body(images).mean((2, 3))), classes)


def characters(text: str = "") -> Task:
    """Blanks in a text to be filled in; by default in one that is on this machine."""
    text = text or _text()
    known = {c: i for i, c in enumerate(sorted(set(text)))}
    codes = torch.tensor([known[c] for c in text])

    def draw(generator: torch.Generator) -> Batch:
        starts = torch.randint(0, len(codes) - TOKENS, (8, 1), generator=generator)
        wanted = codes[starts + torch.arange(TOKENS)]
        blank = torch.rand(wanted.shape, generator=generator) < 0.25
        return wanted.masked_fill(blank, len(known)), wanted.masked_fill(~blank, -100)

    return Task(
        name=f"characters ({len(known)} kinds)",
        net=lambda: CharacterModel(len(known)),
        draw=draw,
        learning_rate=1e-3,
    )


def pictures() -> Task:
    """Classes of images."""
    name, images, classes = _images()

    def draw(generator: torch.Generator) -> Batch:
        chosen = torch.randint(0, len(images), (32,), generator=generator)
        return images[chosen], classes[chosen]

    return Task(name=name, net=ImageModel, draw=draw, learning_rate=1e-3)


def _text() -> str:
    files = sorted(p for p in LICENCES.glob("*") if p.is_file() and not p.is_symlink())
    if files:
        return "".join(p.read_text(errors="ignore") for p in files)
    return "".join(inspect.getsource(m) for m in (inspect, gzip))


def _images() -> tuple[str, torch.Tensor, torch.Tensor]:
    found = FASHION / "train-images-idx3-ubyte.gz"
    if found.exists():
        pixels = np.frombuffer(gzip.decompress(found.read_bytes()), np.uint8, offset=16)
        raw = (FASHION / "train-labels-idx1-ubyte.gz").read_bytes()
        labels = np.frombuffer(gzip.decompress(raw), np.uint8, offset=8)
        images = torch.from_numpy(pixels.copy()).view(-1, 1, 28, 28) / 255
        return "Fashion-MNIST", images, torch.from_numpy(labels.astype(np.int64))
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return "digits (Fashion-MNIST is not installed)", images, torch.tensor(labels)
