"""One training step of BERT-base with one layer: time and memory, FP32 and mixed.

    python examples/bert_layer_training.py [--device cpu|cuda] [--format bf16|fp16|tf32]
                                           [--tuned]

The example of RAF's documentation on mixed precision: batch 8 x 128, vocabulary 30,522, loss
and optimizer in the step. Prints finecast beside ``torch.autocast``, eager and compiled; with
``--tuned`` also the step that ``tune_step`` finds, which takes minutes.
Activations are what forward and backward free again: low copies of weights are among them,
parameters and gradients are not. In PyTorch tf32 is a switch of the process and not a type:
there is nothing to plan, and ``--format tf32`` (CUDA) times the same step with it on and off.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

import finecast.torch

BATCH, TOKENS, VOCABULARY, WIDTH, HEADS = 8, 128, 30522, 768, 12


class Layer(nn.Module):
    """BERT's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.attention_norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same."""
        split = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*split.unbind(0))
        x = self.attention_norm(x + self.output(mixed.transpose(1, 2).reshape(x.shape)))
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    """BERT with one layer, its head and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(512, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.layer = Layer()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.words(ids) + self.places(torch.arange(TOKENS, device=ids.device))
        logits = self.head(self.layer(self.norm(x)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def training_step(
    model: nn.Module, call: Callable[..., torch.Tensor], scale: bool
) -> Callable[..., None]:
    """Forward, backward and optimizer; fp16 with dynamic loss scaling."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    device = next(model.parameters()).device.type
    scaler = torch.amp.GradScaler(device, enabled=scale)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> None:
        scaler.scale(call(ids, labels)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def tuned(model: nn.Module, batch: tuple[torch.Tensor, ...], low: str) -> Callable[..., Any]:
    """The step that is measured to be the fastest no worse than ``torch.autocast``."""
    result = finecast.torch.tune_step(
        model,
        lambda net, ids, labels: net(ids, labels),
        [batch],
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        policy=f"auto:{low}",
    )
    print(result)
    return result.step


def show(
    name: str,
    step: Callable[..., None],
    model: nn.Module,
    batch: tuple[torch.Tensor, ...],
    repeats: int,
) -> None:
    """Print a step's time, and its peak of memory with the parameters."""
    found = finecast.torch.profile(step, batch, repeats=repeats)
    weights = finecast.torch.resident_bytes(model, ())
    print(f"{name} (ms): {found.ms:.1f}")
    print(f"{name} (MBs): {(found.peak_bytes + weights) / 2**20:.1f}")


def main() -> None:
    """Print one line a way of running the step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--format", choices=("bf16", "fp16", "tf32"), default="bf16")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tuned", action="store_true")
    chosen = parser.parse_args()
    if chosen.format == "tf32" and chosen.device != "cuda":
        parser.error("tf32 is a format of CUDA devices")
    low = torch.bfloat16 if chosen.format == "bf16" else torch.float16
    torch.manual_seed(0)
    first = Model().to(chosen.device)
    ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS), device=chosen.device)
    labels = torch.randint(0, VOCABULARY, (BATCH, TOKENS), device=chosen.device)

    def autocast(model: nn.Module) -> Callable[..., Any]:
        def call(*args: torch.Tensor) -> torch.Tensor:
            with torch.autocast(chosen.device, low):
                return model(*args)

        return call

    # finecast plans whole graphs, so it has no eager form of training.
    ways: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
        "FP32, eager": lambda m: m,
        "AMP, torch.autocast, eager": autocast,
        "FP32, compiled": torch.compile,
        "AMP, torch.autocast, compiled": lambda m: torch.compile(autocast(m)),
        "AMP, finecast, compiled": lambda m: finecast.torch.compile(
            m, f"auto:{chosen.format}"
        ),
    }
    if chosen.tuned:
        ways["AMP, finecast, tuned"] = lambda m: tuned(m, (ids, labels), chosen.format)
    if chosen.format == "tf32":
        ways = {
            "FP32, eager": lambda m: m,
            "TF32, eager": lambda m: m,
            "FP32, compiled": torch.compile,
            "TF32, compiled": torch.compile,
        }
    for name, prepare in ways.items():
        # Read when products are compiled and when they run.
        torch.set_float32_matmul_precision("high" if name.startswith("TF32") else "highest")
        torch.compiler.reset()
        model = copy.deepcopy(first)
        scaled = chosen.format == "fp16" and name.startswith("AMP")
        call = prepare(model)
        step = training_step(model, call, scaled)
        show(name, step, model, (ids, labels), chosen.repeats)
        # Without the optimizer gradients stay behind, and so are not counted.
        activations = finecast.torch.activation_bytes(
            lambda *args, c=call: c(*args).backward(), (ids, labels)
        )
        print(f"{name} (MBs of activations): {activations / 2**20:.1f}")


if __name__ == "__main__":
    main()
