"""Architectures of timm and transformers with random weights, exported in their environment.

    PYTHON -m benchmarks.peers.zoo NAME FOLDER

Writes ``model.onnx``, the weights as ``module.pt``, and ``inputs.npz``. The mean output over
the data is subtracted from the output: random weights give all inputs nearly the same scores,
and only their differences are like those of a trained net. Biases that begin as 0 get random
numbers, too: engines treat a convolution without one differently, and no trained net has such
ones. The neural-compressor driver builds the same modules from the weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from zoo.libraries import prepare

_CLASSES: Final = 16
_BIAS: Final = 0.02
CALLS: Final = 275  # of which 250, or 2,000 samples, are held
BATCH: Final = 8
_TOKENS, _VOCABULARY = 64, 1000
_IMAGES: Final = {
    "efficientnet_lite0": 128,
    "resnet18": 96,
    "convnext_atto": 96,
    "vit_tiny": 96,
}  # by name the width of an image
_NAMES: Final = {"vit_tiny": "vit_tiny_patch16_224"}


class Centred(nn.Module):
    """A net whose mean output over its data is 0.

    ``named`` says that its scores are the field ``logits`` of what it gives.
    """

    mean: Tensor

    def __init__(self, net: nn.Module, *, named: bool = False) -> None:
        super().__init__()
        self.net = net
        self.named = named
        self.register_buffer("mean", torch.zeros(_CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """The scores of the classes."""
        found: Any = self.net(x)
        return (found.logits if self.named else found) - self.mean


def build(name: str) -> Centred:
    """The module of that name, in evaluation mode; its weights are random."""
    prepare()
    torch.manual_seed(0)
    if name == "bert":
        from transformers import BertConfig, BertForSequenceClassification  # pyright: ignore

        config = BertConfig(
            vocab_size=_VOCABULARY, hidden_size=256, num_hidden_layers=6,
            num_attention_heads=4, intermediate_size=1024, num_labels=_CLASSES,
        )  # fmt: skip
        return Centred(BertForSequenceClassification(config), named=True).eval()
    import timm  # pyright: ignore

    size = {"img_size": _IMAGES[name]} if name == "vit_tiny" else {}
    net = timm.create_model(
        _NAMES.get(name, name), pretrained=False, num_classes=_CLASSES, **size
    )
    return Centred(net).eval()


def load(name: str, weights: Path) -> Centred:
    """The module with stored weights."""
    net = build(name)
    net.load_state_dict(torch.load(weights, weights_only=True))
    return net


def inputs(name: str) -> np.ndarray[Any, Any]:
    """Calls of one batch each: smooth images of differing colours, or tokens."""
    draw = np.random.default_rng(0)
    if name == "bert":
        return draw.integers(0, _VOCABULARY, (CALLS, BATCH, _TOKENS))
    count, size = CALLS * BATCH, _IMAGES[name]
    coarse = torch.from_numpy(draw.standard_normal((count, 3, 6, 6), np.float32))
    images = nn.functional.interpolate(coarse, (size, size), mode="bicubic")
    images += torch.from_numpy(draw.standard_normal((count, 3, 1, 1), np.float32))
    return images.numpy().reshape(CALLS, BATCH, 3, size, size)


def settle(net: nn.Module, calls: Tensor) -> None:
    """Give batch norms the statistics of the data, as training does."""
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None
        norm.reset_running_stats()
        norm.train()
    if norms:
        with torch.no_grad():
            for call in calls[:8]:
                net(call)
    net.eval()


def with_biases(net: nn.Module) -> None:
    """Give each bias that is 0 everywhere small random numbers."""
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if name.endswith("bias") and not weight.any():
                weight.normal_(std=_BIAS)


def main() -> None:
    """Build, centre and export one."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    net, drawn = build(name), inputs(name)
    with_biases(net)
    calls = torch.from_numpy(drawn)
    settle(net, calls)
    with torch.no_grad():
        net.mean += torch.cat([net(call) for call in calls]).mean(dim=0)
        torch.onnx.export(
            net, (calls[0],), folder / "model.onnx", dynamo=False, opset_version=17,
            input_names=["x"], output_names=["scores"],
            dynamic_axes={"x": {0: "N"}, "scores": {0: "N"}},
        )  # fmt: skip
    torch.save(net.state_dict(), folder / "module.pt")
    np.savez(folder / "inputs.npz", x=drawn)


if __name__ == "__main__":
    main()
