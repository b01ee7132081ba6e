"""Errors of a detector's plans against what becomes of its detections.

A small detector of the YOLO family is trained on drawn shapes: boxes in pixels and scores
stand in one output. Random plans of it run in OpenVINO on noisy images. Printed is the rank
correlation of F1, against fp32's detections, with the error of the whole output, and with that
of the worst slice.

    python -m benchmarks.bench_detector    # needs torch and openvino; some ten minutes
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import nn

import finecast
from benchmarks.common import report
from finecast.data.deviation import deviation
from finecast.engines import get_engine
from finecast.rules.policy import Policy

SIDE, SHOWN, CLASSES = 64, 640, 4
SCALE: Final = SHOWN / SIDE
STEPS, PLANS, IMAGES, CALL = 4000, 30, 768, 32
NOISE: Final = 0.45  # of evaluation: faint shapes are at the border of what is detected
POLICIES: Final = ("all:bf16", "all:int8", "all:int8,bf16")
SHARES: Final = (0.0, 0.2, 0.5, 0.8)  # of the ops that keep fp32
SURE, OVERLAP = 0.3, 0.5

Array = NDArray[np.float32]
Box = tuple[int, Array]


def drawn(rng: np.random.Generator, count: int) -> tuple[Array, list[list[Box]]]:
    """Images with rectangles, ellipses, diamonds and rings, and their boxes in pixels."""
    images = rng.normal(0, 0.15, (count, 3, SIDE, SIDE)).astype(np.float32)
    y, x = np.mgrid[:SIDE, :SIDE]
    truth: list[list[Box]] = []
    for image in images:
        boxes: list[Box] = []
        for _ in range(rng.integers(1, 4)):
            size = rng.uniform(9, 32, 2)
            place = rng.uniform(size / 2, SIDE - size / 2)
            box = np.concatenate([place, size]).astype(np.float32) * np.float32(SCALE)
            if any((abs(box[:2] - b[:2]) < (box[2:] + b[2:]) / 2).all() for _, b in boxes):
                continue
            kind = int(rng.integers(CLASSES))
            dx, dy = (x - place[0]) / (size[0] / 2), (y - place[1]) / (size[1] / 2)
            round_ = dx**2 + dy**2
            inside = (
                np.maximum(abs(dx), abs(dy)) < 1,
                round_ < 1,
                abs(dx) + abs(dy) < 1,
                (round_ < 1) & (round_ > 0.35),
            )[kind]
            colour = rng.normal(0, 1, 3)
            colour *= rng.uniform(0.35, 1.2) / np.linalg.norm(colour)
            image[:, inside] += colour[:, None].astype(np.float32)
            boxes.append((kind, box))
        truth.append(boxes)
    return images, truth


def _block(read: int, made: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(read, made, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(made), nn.SiLU())


class Detector(nn.Module):
    """A backbone of two scales, with heads for boxes and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _block(3, 12, 2), _block(12, 24, 2), _block(24, 24), _block(24, 48, 2)
        )
        self.low = nn.Sequential(_block(48, 64, 2), _block(64, 64))
        self.up = _block(112, 48)
        self.boxes = nn.ModuleList(self._head(c, 4) for c in (48, 64))
        self.scores = nn.ModuleList(self._head(c, CLASSES) for c in (48, 64))
        for head in self.scores:
            nn.init.constant_(head[1].bias, -5.0)  # pyright: ignore[reportIndexIssue, reportArgumentType]

    @staticmethod
    def _head(read: int, made: int) -> nn.Sequential:
        return nn.Sequential(_block(read, 32), nn.Conv2d(32, made, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Centre, size and scores of each anchor: float32[n, 4 + CLASSES, anchors]."""
        fine = self.stem(x)
        coarse = self.low(fine)
        grown = nn.functional.interpolate(coarse, scale_factor=2.0, mode="nearest")
        fine = self.up(torch.cat([fine, grown], 1))
        found: list[torch.Tensor] = []
        for k, (values, stride) in enumerate(((fine, 8), (coarse, 16))):
            raw, count = self.boxes[k](values).flatten(2), SIDE // stride
            at = torch.arange(count, dtype=torch.float32) + 0.5
            grid = torch.stack([at.repeat(count), at.repeat_interleave(count)])[None]
            place = (grid + raw[:, :2]) * (stride * SCALE)
            size = raw[:, 2:].clamp(max=4).exp() * (stride * SCALE)
            found.append(
                torch.cat([place, size, self.scores[k](values).flatten(2).sigmoid()], 1)
            )
        return torch.cat(found, 2)


def _wanted(truth: Sequence[Sequence[Box]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The output that training aims at, and which anchors have a shape."""
    anchors = (SIDE // 8) ** 2 + (SIDE // 16) ** 2
    wanted = torch.zeros(len(truth), 4 + CLASSES, anchors)
    taken = torch.zeros(len(truth), anchors, dtype=torch.bool)
    for image, boxes in enumerate(truth):
        for kind, box in boxes:
            fine = box[2:].max() < 20 * SCALE
            stride, start = (8, 0) if fine else (16, (SIDE // 8) ** 2)
            column, row = (int(v // (stride * SCALE)) for v in box[:2])
            anchor = start + row * (SIDE // stride) + column
            wanted[image, :4, anchor] = torch.from_numpy(box)
            wanted[image, 4 + kind, anchor] = 1
            taken[image, anchor] = True
    return wanted, taken


def trained() -> Detector:
    """The detector, by focal loss on scores and logarithmic loss on boxes."""
    torch.manual_seed(0)
    rng, net = np.random.default_rng(0), Detector()
    optimizer: Any = torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, STEPS)
    for _ in range(STEPS):
        images, truth = drawn(rng, 16)
        wanted, taken = _wanted(truth)
        got = net(torch.from_numpy(images))
        p, right = got[:, 4:].clamp(1e-6, 1 - 1e-6), wanted[:, 4:]
        hit, miss = right * (1 - p) ** 2 * p.log() * 4, (1 - right) * p**2 * (1 - p).log()
        here = taken[:, None].expand(-1, 4, -1)
        off = torch.log1p((got[:, :4][here] - wanted[:, :4][here]).abs() / 8)
        loss = (off.sum() - (hit + miss).sum()) / taken.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        schedule.step()
    return net.eval()


def _share(a: Array, b: Array) -> float:
    low = np.maximum(a[:2] - a[2:] / 2, b[:2] - b[2:] / 2)
    high = np.minimum(a[:2] + a[2:] / 2, b[:2] + b[2:] / 2)
    both = np.prod(np.maximum(high - low, 0))
    return float(both / (np.prod(a[2:]) + np.prod(b[2:]) - both))


def detections(output: Array) -> list[list[Box]]:
    """The boxes of each image after non-maximum suppression."""
    found: list[list[Box]] = []
    for image in output:
        scores, kinds = image[4:].max(0), image[4:].argmax(0)
        kept: list[Box] = []
        for k in np.argsort(-scores)[: (scores > SURE).sum()]:
            box = image[:4, k]
            if all(kinds[k] != c or _share(box, b) < OVERLAP for c, b in kept):
                kept.append((int(kinds[k]), box))
        found.append(kept)
    return found


def f1(got: Sequence[Sequence[Box]], wanted: Sequence[Sequence[Box]]) -> float:
    """Of boxes of the same class that overlap by half."""
    hits = 0
    for mine, theirs in zip(got, wanted, strict=True):
        left = list(theirs)
        for kind, box in mine:
            partner = next(
                (k for k, (c, b) in enumerate(left) if c == kind and _share(box, b) > OVERLAP),
                None,
            )
            if partner is not None:
                hits += 1
                left.pop(partner)
    return 2 * hits / max(sum(map(len, got)) + sum(map(len, wanted)), 1)


def main() -> None:
    """Train, make plans, and print how their errors and F1 are ordered."""
    from scipy.stats import spearmanr

    with tempfile.TemporaryDirectory() as folder:
        path, low = Path(folder) / "detector.onnx", Path(folder) / "low.onnx"
        torch.onnx.export(
            trained(), (torch.zeros(1, 3, SIDE, SIDE),), path, input_names=["x"],
            output_names=["y"], dynamic_axes={"x": {0: "n"}, "y": {0: "n"}}, dynamo=False,
        )  # fmt: skip
        rng = np.random.default_rng(11)
        x, _ = drawn(rng, IMAGES)
        x += rng.normal(0, NOISE, x.shape).astype(np.float32)

        def outputs(file: Path) -> Array:
            session = get_engine("openvino").load(file.read_bytes())
            calls = range(0, IMAGES, CALL)
            found = [session.run({"x": x[i : i + CALL]})["y"] for i in calls]
            return np.concatenate(found).astype(np.float32)

        exact = outputs(path)
        wanted = detections(exact)
        names = [node.name for node in onnx.load(path).graph.node]
        rows: list[tuple[float, float, float]] = []
        for k in range(PLANS):
            kept = [
                n for n in names if rng.random() < SHARES[k // len(POLICIES) % len(SHARES)]
            ]
            patterns = tuple(re.compile(f"^{re.escape(n)}$") for n in kept)
            policy = replace(Policy.parse(POLICIES[k % len(POLICIES)]), exclude=patterns)
            finecast.convert(
                path, low, policy, engine="openvino", data={"x": x[:64]}, force=True,
                verify=False, progress=False,
            )  # fmt: skip
            got = outputs(low)
            whole = deviation(got.reshape(-1), exact.reshape(-1)).relative
            worst = deviation(got, exact).relative
            rows.append((whole, worst, f1(detections(got), wanted)))
    errors = np.array(rows)
    for column, what in enumerate(("the whole output", "the worst slice")):
        found: Any = spearmanr(errors[:, column], -errors[:, 2])
        report(
            "detector", f"rank correlation of F1 and the error of {what}", float(found[0]), ""
        )


if __name__ == "__main__":
    main()
