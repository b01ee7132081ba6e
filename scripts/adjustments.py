"""Measures int8's error with and without corrected biases; writes docs/adjustments.md.

    python scripts/adjustments.py ../shared/models [--only sts_minilm_l6]

The folder holds ``cases.py`` with the models and data, and Fashion-MNIST, on which a net of
depthwise convolutions is trained in a minute. Every product that may be is in int8. One half
of the data calibrates; errors are those of the outputs on the other half, in OpenVINO.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from finecast import api
from finecast.data.function_workload import FunctionWorkload
from finecast.engines.base import Feeds
from finecast.measure.environment import cpu_label, environment
from finecast.native.engine_subject import EngineSubject
from finecast.native.gains import output_error
from finecast.numbers.formats import Format
from finecast.progress import silent
from finecast.rules.policy import Policy

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
MODELS: Final = ("cifar10_resnet20", "sts_minilm_l6")
DEPTHWISE: Final = "depthwise"
TRIED: Final = ("none", "bias")
_CALLS, _BATCH, _EPOCHS = 16, 32, 4


def depthwise(data: Path) -> nn.Module:
    """MobileNet's blocks with Relu, trained on Fashion-MNIST."""
    torch.manual_seed(0)
    arrays = np.load(data)
    x, y = pixels(arrays["train_x"]), torch.tensor(arrays["train_y"]).long()
    layers = block(1, 16, 2)
    for before, after, stride in ((16, 32, 1), (32, 32, 2), (32, 64, 1), (64, 64, 2)):
        layers += [*block(before, before, stride, before), *block(before, after, 1, size=1)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    for _ in range(_EPOCHS):
        for rows in torch.randperm(len(x)).split(100):
            loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.eval()


def pixels(array: Any) -> torch.Tensor:
    """Images of one channel, from 0 to 1."""
    return torch.tensor(array).float().reshape(-1, 1, 28, 28) / 255


def block(
    before: int, after: int, stride: int, groups: int = 1, size: int = 3
) -> list[nn.Module]:
    """A convolution, its norm, and Relu."""
    conv = nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(after), nn.ReLU()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Relative output errors of a model in int8, and numbers of adjusted operands.

    Both are by the names of ``TRIED``.
    """

    model: str
    products: int
    errors: Mapping[str, float]
    operands: Mapping[str, int]


def figure(name: str, model: Path, calls: Sequence[Feeds]) -> Figure:
    """The figure of one model."""
    calibration, others = calls[::2], calls[1::2]
    workload = FunctionWorkload(
        function=lambda run: 0.0,
        name="",
        calibrate=lambda: calibration,
        remembered=list(others),
    )
    subject = api.load(model).subject("openvino", None)
    assert isinstance(subject, EngineSubject)
    examined = subject.examine(Policy.parse("all:int8"), (), workload, silent)
    plain = examined.planner.lowest()
    errors: dict[str, float] = {}
    operands: dict[str, int] = {}
    for kind in TRIED:
        plan = examined.corrected(plain) if kind == "bias" else plain
        built = subject.model.build(plan)
        errors[kind] = output_error(subject.session(built), subject.reference, others)
        operands[kind] = len(plan.adjustments)
        built.release()
        print(name, kind, errors[kind], operands[kind], flush=True)
    products = sum(f is Format.INT8 for f in plain.formats.values())
    return Figure(model=name, products=products, errors=errors, operands=operands)


def together(feeds: Sequence[Feeds]) -> list[Feeds]:
    """Batches of single samples, if all have one shape; else the first calls as they are."""
    whole = {tuple(a.shape for a in f.values()) for f in feeds}
    if len(whole) > 1 or any(a.shape[:1] != (1,) for a in feeds[0].values()):
        return list(feeds)[: 4 * _CALLS]
    return [
        {n: np.concatenate([f[n] for f in feeds[i : i + _BATCH]]) for n in feeds[0]}
        for i in range(0, len(feeds), _BATCH)
    ]


def figures(models: Path, names: Sequence[str]) -> Iterator[Figure]:
    """The figures of all models."""
    sys.path.insert(0, str(models))
    cases: dict[str, Any] = importlib.import_module("cases").CASES
    for name in names:
        if name != DEPTHWISE:
            data = together(list(cases[name].calib(_BATCH * _CALLS)))
            yield figure(name, Path(cases[name].model()), data)
            continue
        data = models / "train_from_scratch" / "fashion_mnist_20k_10k.npz"
        x = pixels(np.load(data)["test_x"])[: _BATCH * _CALLS].numpy()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "net.onnx"
            torch.onnx.export(
                depthwise(data),
                (torch.tensor(x[:2]),),
                path,
                input_names=["x"],
                output_names=["y"],
                dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
                dynamo=False,
            )
            yield figure(name, path, [{"x": p} for p in np.array_split(x, _CALLS)])


def table(found: Sequence[Figure]) -> list[str]:
    """The page's table: for each model its errors, and numbers of adjusted operands."""
    rows = [f"| model | int8 products | {' | '.join(TRIED)} |", "|---" * 4 + "|"]
    for one in found:
        cells = (
            f"{one.errors[k]:.4f}" + (f" ({one.operands[k]})" if one.operands[k] else "")
            for k in TRIED
        )
        rows.append(f"| {one.model} | {one.products} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    """Measure all models, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("--only", action="append")
    parser.add_argument("--out", type=Path, default=DOCS)
    options = parser.parse_args()
    found = [*figures(options.models, options.only or (*MODELS, DEPTHWISE))]
    head = (DOCS / "adjustments.md").read_text().partition("<!-- figures -->")[0]
    made = f"Made on {cpu_label(environment())}."
    text = [f"{head}<!-- figures -->", made, "", *table(found), ""]
    (options.out / "adjustments.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
