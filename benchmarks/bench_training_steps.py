"""Tuned training steps beside compiled autocast, in one run, by turns.

    python -m benchmarks.bench_training_steps [steps|curves|held] [NET ...]

``steps`` tunes a step of six nets, and of RAF's example (one layer of BERT with its loss and
optimizer): time beside compiled autocast and fp32, peak of forward and backward pass, errors
of gradients and updates. ``curves`` tunes and then trains on the data in
``../shared/models/train_from_scratch``: in fp32, under autocast and as tuned, on the same data
for each seed. ``held`` trains on that data in fp32, with states of the optimizer in bf16
between its steps, and with the gradients of micro-batches added up in bf16; it measures no
time. ``steps`` and ``curves`` need a C++ compiler and an idle machine; with ``--op-by-op``
nothing is compiled, and times mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

# First, as it exits with a message where PyTorch is not installed.
from benchmarks.torch_common import Case  # isort: skip

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

import finecast.torch
from benchmarks import training_tasks
from benchmarks.torch_families import FAMILIES, TOKENS, WORDS
from benchmarks.training_tasks import ImageModel
from examples.bert_layer_training import Model
from finecast_training.optimizer_states import GRADIENTS
from finecast_training.paired_trial import paired_trial
from finecast_training.step_plan import StepPlan, Way
from finecast_training.step_tuning import StepResult
from finecast_training.target import Sampling, StepTarget

DATA = Path(__file__).parents[2] / "shared" / "models" / "train_from_scratch"
Batch = tuple[torch.Tensor, ...]
_BATCHES: Final = 6
_DRAWN: Final = 256


class Tagger(nn.Module):
    """An LSTM between embeddings and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.recurrent = nn.Embedding(WORDS, 256), nn.LSTM(256, 256)
        self.head = nn.Linear(256, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[tokens, batch] to [tokens, batch, words]."""
        return self.head(self.recurrent(self.words(ids))[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A net with its loss, its batches and its optimizer's rate."""

    net: Callable[[], nn.Module]
    loss: Callable[..., torch.Tensor]
    draw: Callable[[torch.Generator], Batch]
    rate: float = 1e-3


def classes(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the scores of the last axis."""
    return F.cross_entropy(net(x).flatten(0, -2), y.flatten())


def noise(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean squared error, as of a diffusion model."""
    return F.mse_loss(net(x), y)


def own(net: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    """The loss of a net that gives its loss."""
    return net(*batch)


def words(batch: int, *, first: bool = True) -> Callable[[torch.Generator], Batch]:
    """Random tokens, and others to be told."""
    shape = (batch, TOKENS) if first else (TOKENS, batch)

    def draw(generator: torch.Generator) -> Batch:
        x = torch.randint(0, WORDS, shape, generator=generator)
        return x, (x * 7 + 1) % WORDS

    return draw


def pictures(batch: int, *, same: bool = False) -> Callable[[torch.Generator], Batch]:
    """Random pictures with classes, or with pictures to be told."""

    def draw(generator: torch.Generator) -> Batch:
        x = torch.randn(batch, 3, 64, 64, generator=generator)
        told = x.mean((1, 2, 3)).argsort().argsort() % 10
        return x, torch.tanh(x) if same else told

    return draw


def _net(name: str) -> Callable[[], nn.Module]:
    case: Case = FAMILIES[name]
    return case.net


def _raf(generator: torch.Generator) -> Batch:
    x = torch.randint(0, 10000, (8, 128), generator=generator)
    return x, torch.randint(0, 30522, (8, 128), generator=generator)


STEPS: Final = {
    "bert": Job(net=_net("bert"), loss=classes, draw=words(8)),
    "gpt2": Job(net=_net("gpt2"), loss=classes, draw=words(8)),
    "vit": Job(net=_net("vit"), loss=classes, draw=pictures(16)),
    "resnet": Job(net=_net("resnet"), loss=classes, draw=pictures(16)),
    "unet": Job(net=_net("unet"), loss=noise, draw=pictures(8, same=True)),
    "lstm": Job(net=Tagger, loss=classes, draw=words(8, first=False)),
    "raf": Job(net=Model, loss=own, draw=_raf),
}


def fashion(data: Path) -> Job:
    """Classes of Fashion-MNIST."""
    held = np.load(data / "fashion_mnist_20k_10k.npz")
    images = torch.from_numpy(held["train_x"])[:, None].float() / 255
    labels = torch.from_numpy(held["train_y"].astype(np.int64))

    def draw(generator: torch.Generator) -> Batch:
        chosen = torch.randint(0, len(images), (64,), generator=generator)
        return images[chosen], labels[chosen]

    return Job(net=ImageModel, loss=own, draw=draw)


def characters(data: Path) -> Job:
    """Blanks in a text to be filled in."""
    task = training_tasks.characters(
        (data / "tinyshakespeare.txt").read_text(encoding="utf-8")
    )
    return Job(net=task.net, loss=own, draw=task.draw)


CURVES: Final = {"fashion": fashion, "characters": characters}


def tuned(job: Job, trial_steps: int = 0, seeds: int = 5) -> StepResult:
    """The tuned step of a job."""
    torch.manual_seed(0)
    net, generator = job.net().train(), torch.Generator().manual_seed(0)
    return finecast.torch.tune_step(
        net,
        job.loss,
        [job.draw(generator) for _ in range(16 if trial_steps else _BATCHES)],
        optimizer=torch.optim.AdamW(net.parameters(), lr=job.rate),
        trial_steps=trial_steps,
        seeds=seeds if trial_steps else None,
    )


def held(name: str, job: Job, steps: int, seeds: int, micro_batches: int) -> None:
    """What training in fp32 loses where something is in bf16 between the optimizer's steps."""
    torch.manual_seed(0)
    net, generator = job.net().train(), torch.Generator().manual_seed(0)
    target = StepTarget.of(
        net, job.loss, [job.draw(generator)],
        [torch.optim.AdamW(net.parameters(), lr=job.rate)], Sampling(moments=1, between=0),
    )  # fmt: skip
    target.batches = [job.draw(generator) for _ in range(_DRAWN)]
    exact = StepPlan(name="fp32", policy="auto:bf16", way=Way.FP32)
    call = exact.compile(target.module, kernels=False)
    for micro, ways in (
        (1, (("exp_avg",), ("exp_avg_sq",))),
        (micro_batches, ((GRADIENTS,), ("exp_avg", GRADIENTS))),
    ):
        calls = {"fp32": (call, exact)} | {
            ", ".join(states): (call, replace(exact, states=states)) for states in ways
        }
        trial = paired_trial(target, calls, steps=steps, seeds=seeds, micro_batches=micro)
        final = float(np.mean(trial.losses["fp32"]))
        print(f"{name}, {micro} batches an update: fp32 ends at {final:.4g}")
        for way in [*calls][1:]:
            verdict = "worse" if trial.is_worse(way) else "not worse"
            print(f"   {way} in bf16: {trial.text(way)}: {verdict}", flush=True)


def report(name: str, result: StepResult) -> None:
    """One line for the choice, one for each step that was compiled."""
    print(f"{name}: {result}")
    beside = result.tables[0]
    print("  ", " | ".join((*beside.left, *beside.right)))
    for row in beside.rows:
        print("  ", " | ".join(row))
    best, autocast = result.best, next(
        c for c in result.candidates if c.plan.way is Way.AUTOCAST
    )  # fmt: skip
    print(
        f"   bars: time {best.seconds / autocast.seconds:.3f} of autocast's (at most .97),"
        f" memory {best.memory_bytes / max(autocast.memory_bytes, 1):.3f} (at most 1),"
        f" gradients {best.error / autocast.error:.3f} (at most 1)",
        flush=True,
    )


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "what", nargs="?", default="steps", choices=("steps", "curves", "held")
    )
    parser.add_argument("nets", nargs="*")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=500, help="of curves and held")
    parser.add_argument("--data", type=Path, default=DATA, help="of curves and held")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=8, help="of held")
    parser.add_argument("--op-by-op", action="store_true", help="compile nothing")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    warnings.simplefilter("ignore")
    if chosen.op_by_op:
        compiles = StepPlan.compile

        def op_by_op(self: StepPlan, module: Any, *, kernels: bool = True) -> Any:
            del kernels
            return compiles(self, module, kernels=False)

        StepPlan.compile = op_by_op
    if chosen.what != "steps" and not chosen.data.is_dir():
        sys.exit(f"there is no {chosen.data}")
    if chosen.what == "held":
        for name in chosen.nets or CURVES:
            job = CURVES[name](chosen.data)
            held(name, job, chosen.steps, chosen.seeds, chosen.micro_batches)
        return
    if chosen.what == "curves":
        for name in chosen.nets or CURVES:
            report(name, tuned(CURVES[name](chosen.data), chosen.steps, chosen.seeds))
        return
    for name in chosen.nets or STEPS:
        report(name, tuned(STEPS[name]))


if __name__ == "__main__":
    main()
