"""Train the digits example and export it: `digits.onnx` and its two data files.

The model is a small residual network in FP32. It is made once and its outputs are committed,
so that the demo needs neither PyTorch nor scikit-learn. Making it again needs both:

    pip install torch==2.13.0 scikit-learn onnx onnxscript
    python examples/digits/make_digits.py

The seed fixes the split and the initial weights. Weights still differ in their last bits
between machines and PyTorch builds: the order of additions in a convolution is not fixed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

OPSET = 18
PIXEL_MAX = 16.0  # the pixels of the UCI set count inked cells of a 4x4 block: 0 to 16
PIXEL_MEAN, PIXEL_STD = 0.3053, 0.3760  # of the whole set, after division by PIXEL_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line sets."""

    out: Path
    epochs: int
    channels: int
    blocks: int
    eval_count: int
    calib_count: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Disjoint parts of the data set: `image` float32 [N, 1, 8, 8], `label` int64 [N]."""

    train_image: Tensor
    train_label: Tensor
    eval_image: Tensor
    eval_label: Tensor
    calib_image: Tensor


class ConvNorm(nn.Module):
    """A 3x3 convolution and its batch norm, which `fold` merges into the convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm: nn.Module = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))

    def fold(self) -> None:
        assert isinstance(self.norm, nn.BatchNorm2d)
        self.conv = fuse_conv_bn_eval(self.conv, self.norm)
        self.norm = nn.Identity()


class Block(nn.Module):
    """Two convolutions beside an identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = ConvNorm(channels, channels)
        self.second = ConvNorm(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.second(functional.relu(self.first(x))))


class DigitsNet(nn.Module):
    """[N, 1, 8, 8] normalised images to [N, 10] logits."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.stem = ConvNorm(1, channels)
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, 10)

    def forward(self, image: Tensor) -> Tensor:
        features = self.blocks(functional.relu(self.stem(image)))
        pooled = functional.adaptive_avg_pool2d(features, 1)
        return self.head(torch.flatten(pooled, 1))


def load_split(options: Options) -> Split:
    """Shuffle the data set with the seed and cut it in three."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(options.seed).permutation(len(images))
    scaled = (images[order] / PIXEL_MAX - PIXEL_MEAN) / PIXEL_STD
    image = torch.from_numpy(scaled.astype(np.float32).reshape(-1, 1, 8, 8))
    label = torch.from_numpy(labels[order].astype(np.int64))
    calib_end = options.eval_count + options.calib_count
    return Split(
        train_image=image[calib_end:],
        train_label=label[calib_end:],
        eval_image=image[: options.eval_count],
        eval_label=label[: options.eval_count],
        calib_image=image[options.eval_count : calib_end],
    )


def shifted(image: Tensor) -> Tensor:
    """Move a batch by up to one pixel in each direction; what leaves is filled with paper."""
    paper = -PIXEL_MEAN / PIXEL_STD
    padded = functional.pad(image, (1, 1, 1, 1), value=paper)
    top, left = (int(v) for v in torch.randint(0, 3, (2,)))
    return padded[:, :, top : top + 8, left : left + 8]


@torch.no_grad()
def accuracy(net: nn.Module, image: Tensor, label: Tensor) -> float:
    """Share of images whose largest logit is the label's."""
    return float((net(image).argmax(1) == label).float().mean())


def train(net: DigitsNet, split: Split, epochs: int) -> None:
    """Fit in place: AdamW with one learning-rate cycle, label smoothing and small shifts."""
    batch, count = 64, len(split.train_image)
    steps = epochs * (count // batch)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for epoch in range(epochs):
        net.train()
        order = torch.randperm(count)[: count // batch * batch]
        for index in order.split(batch):
            logits = net(shifted(split.train_image[index]))
            loss = functional.cross_entropy(
                logits, split.train_label[index], label_smoothing=0.05
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        net.eval()
        score = accuracy(net, split.eval_image, split.eval_label)
        print(f"epoch {epoch + 1:2d}/{epochs}  loss {loss.item():.4f}  eval {score:.4f}")


def export(net: DigitsNet, example: Tensor, path: Path) -> None:
    """Fold the batch norms, write one ONNX file with a dynamic batch, and check it."""
    net.eval()
    for module in net.modules():
        if isinstance(module, ConvNorm):
            module.fold()
    torch.onnx.export(
        net,
        (example[:2],),
        path,
        input_names=["image"],
        output_names=["logits"],
        opset_version=OPSET,
        dynamic_shapes={"image": {0: torch.export.Dim("batch", min=1)}},
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    model = onnx.load(path)
    # The exporter notes the Python stack of every node, with this machine's paths: noise here.
    for proto in (model.graph, *model.graph.node, *model.graph.input, *model.graph.output):
        del proto.metadata_props[:]
    for value in (*model.graph.value_info, *model.graph.initializer):
        del value.metadata_props[:]
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def parse(arguments: list[str]) -> Options:
    """Read the command line."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(
        description="Train the digits example and write digits.onnx, digits_eval.npz "
        "and digits_calib.npz.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=here, help="folder to write to")
    parser.add_argument("--epochs", type=int, default=40, help="passes over the training part")
    parser.add_argument("--channels", type=int, default=64, help="width of every convolution")
    parser.add_argument("--blocks", type=int, default=4, help="residual blocks")
    parser.add_argument("--eval-count", type=int, default=600, help="images held out to score")
    parser.add_argument("--calib-count", type=int, default=64, help="images to calibrate with")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the weights")
    return Options(**vars(parser.parse_args(arguments)))


def main(arguments: list[str]) -> int:
    """Train, export and save; returns 0."""
    options = parse(arguments)
    torch.manual_seed(options.seed)
    split = load_split(options)
    net = DigitsNet(options.channels, options.blocks)
    train(net, split, options.epochs)
    options.out.mkdir(parents=True, exist_ok=True)
    export(net, split.eval_image, options.out / "digits.onnx")
    np.savez_compressed(
        options.out / "digits_eval.npz",
        image=split.eval_image.numpy(),
        label=split.eval_label.numpy(),
    )
    np.savez_compressed(options.out / "digits_calib.npz", image=split.calib_image.numpy())
    print(
        f"top-1 on {len(split.eval_image)} images: "
        f"{accuracy(net, split.eval_image, split.eval_label):.4f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
