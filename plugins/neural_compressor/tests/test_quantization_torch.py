"""Intel Neural Compressor's post-training quantization of PyTorch's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.fx import GraphModule
from torch.utils.data import DataLoader, TensorDataset

from finecast.errors import EngineError, ModelError, UsageError
from finecast.frontends.torch.codes import scales_of_products
from finecast.native.torch import planning, subject
from finecast_neural_compressor import (
    AccuracyCriterion,
    Metric,
    MixedPrecisionConfig,
    PostTrainingQuantConfig,
    TuningCriterion,
    load,
    mix_precision,
    quantization,
)
from finecast_neural_compressor.torch_models import TorchResult

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:set torch._inductor.config.freezing"),
    pytest.mark.filterwarnings("ignore:times are those of modules compiled"),
    pytest.mark.filterwarnings("ignore:.*no speed is gained here"),
]

FP32 = {"weight": {"dtype": ["fp32"]}, "activation": {"dtype": ["fp32"]}}
NO_BF16: dict[str, Any] = {"excluded_precisions": ["bf16"]}


class Digits(nn.Module):
    """A small convolutional net for images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()),
        )
        self.head = nn.Linear(16 * 8 * 8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


@pytest.fixture(scope="module")
def data() -> TensorDataset:
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return TensorDataset(images, torch.tensor(digits.target))


@pytest.fixture(scope="module")
def trained(data: TensorDataset) -> nn.Module:
    torch.manual_seed(0)
    net = Digits()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for x, y in DataLoader(data, batch_size=128):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.eval()


@pytest.fixture(autouse=True)
def _integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled modules run all products on integers, op by op, whatever this CPU has."""
    monkeypatch.setenv("FORCE_INT8", "1")
    monkeypatch.setenv("FORCE_BF16", "1")

    def compiled(
        module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *_: object
    ) -> tuple[Callable[..., Any], frozenset[str]]:
        del args, kwargs
        return module, frozenset()

    for room in (planning, subject):
        monkeypatch.setattr(room, "compiled_frozen", compiled)


def loader(data: TensorDataset, size: int = 64) -> Iterable[Any]:
    return DataLoader(data, batch_size=size)


def accuracy(data: TensorDataset) -> Callable[[nn.Module], float]:
    def top1(model: nn.Module) -> float:
        images, labels = data.tensors
        with torch.no_grad():
            return float((model(images).argmax(1) == labels).float().mean())

    return top1


def formats(result: TorchResult) -> dict[str, str]:
    """The format of each product, by the module that it is written in."""
    plan: Any = result.model.finecast_plan
    found = {d.node: d.format.label for d in plan.decisions if d.op in ("conv", "linear")}
    return dict(zip(("features.0", "features.2", "head"), found.values(), strict=True))


def test_a_module_is_quantized_on_several_batches(
    trained: nn.Module, data: TensorDataset, tmp_path: Path
) -> None:
    found = quantization.fit(
        trained, PostTrainingQuantConfig(calibration_sampling_size=[200]), loader(data)
    )
    assert isinstance(found, TorchResult)
    assert set(formats(found).values()) == {"int8"}
    assert found.products == len(scales_of_products(cast("GraphModule", found.model))) == 3
    top1 = accuracy(data)
    assert top1(found.model) >= top1(trained) - 0.02
    found.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert (again.lowered, again.products) == (found.lowered, found.products)
    for size in (1, 7):
        x = data.tensors[0][:size]
        assert torch.equal(again(x), found(x))


def test_ranges_are_those_of_all_batches(trained: nn.Module, data: TensorDataset) -> None:
    """The last batch has values that are ten times as large as those of the first."""
    images, labels = data.tensors
    batches = [(images[:32], labels[:32]), (10 * images[:32], labels[:32])]
    scales: list[float] = []
    for size in (32, 64):
        conf = PostTrainingQuantConfig(calibration_sampling_size=[size], **NO_BF16)
        found = quantization.fit(trained, conf, batches)
        encodings = next(iter(found.model.finecast_plan.encodings.values()))
        scales.append(float(np.ravel(encodings.operands[0].scale)[0]))
    assert scales[1] == pytest.approx(10 * scales[0], rel=1e-3)


@pytest.mark.filterwarnings("ignore:no op is in int8")  # what the op dicts ask for
@pytest.mark.parametrize(
    ("settings", "want"),
    [
        (
            {
                "op_type_dict": {"Linear": {"weight": {"dtype": ["bf16", "fp32"]}}},
                "op_name_dict": {"features.2": FP32},
            },
            ["int8", "fp32", "bf16"],
        ),
        (
            {"op_type_dict": {"Sequential": {"weight": {"dtype": ["bf16"]}}}},
            ["bf16", "bf16", "int8"],
        ),
        ({"recipes": {"last_conv_or_matmul_quantization": False}}, ["int8", "int8", "bf16"]),
    ],
)
def test_op_dicts_are_of_modules(
    trained: nn.Module, data: TensorDataset, settings: dict[str, Any], want: list[str]
) -> None:
    found = quantization.fit(trained, PostTrainingQuantConfig(**settings), loader(data))
    assert [*formats(found).values()] == want


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"op_name_dict": {"haed": FP32}}, "unknown op 'haed'.*head"),
        ({"op_type_dict": {"Linaer": FP32}}, "unknown op 'Linaer'.*Linear"),
        ({"approach": "dynamic"}, 'use approach="static"'),
        ({"inputs": "x"}, "a module does not have"),
        ({"backend": "itex"}, "for TensorFlow models"),
        ({"recipes": {"fast_bias_correction": True}}, "adjust"),
        ({"accuracy_criterion": AccuracyCriterion(tolerable_loss=2)}, "0.02 for 2%"),
    ],
)
def test_what_cannot_be_followed_raises(
    trained: nn.Module, data: TensorDataset, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        quantization.fit(trained, PostTrainingQuantConfig(**settings), loader(data))
    with pytest.raises(UsageError, match="give calib_dataloader"):
        quantization.fit(trained, PostTrainingQuantConfig())


def test_the_accuracy_is_kept(trained: nn.Module, data: TensorDataset) -> None:
    """By the size, which is counted and not timed."""
    seen: list[type] = []
    top1 = accuracy(data)

    def evaluate(model: nn.Module) -> float:
        seen.append(type(model))
        return top1(model)

    conf = PostTrainingQuantConfig(
        tuning_criterion=TuningCriterion(objective="modelsize"),
        accuracy_criterion=AccuracyCriterion(tolerable_loss=0.02),
    )
    found = quantization.fit(trained, conf, loader(data), eval_func=evaluate)
    assert seen[0] is Digits  # the module as it was given
    assert found is not None
    assert "int8" in formats(found).values()
    assert top1(found.model) >= 0.98 * top1(trained)


def test_a_dataloader_and_a_metric(trained: nn.Module, data: TensorDataset) -> None:
    conf = PostTrainingQuantConfig(tuning_criterion=TuningCriterion(objective="modelsize"))
    found = quantization.fit(
        trained, conf, eval_dataloader=loader(data, 256), eval_metric=Metric(name="topk")
    )
    assert found is not None
    assert formats(found)["head"] == "int8"


def test_no_module_where_none_keeps_the_accuracy(
    trained: nn.Module, data: TensorDataset
) -> None:
    def evaluate(model: nn.Module) -> float:
        return 1.0 if model is trained else 0.0

    tuning = TuningCriterion(objective="modelsize", max_trials=2)
    conf = PostTrainingQuantConfig(tuning_criterion=tuning)
    with pytest.warns(UserWarning, match="no quantized model"):
        assert quantization.fit(trained, conf, loader(data), eval_func=evaluate) is None


def test_precisions_of_mixed_precision(trained: nn.Module, data: TensorDataset) -> None:
    conf = MixedPrecisionConfig(precisions=["int8", "bf16"])
    found = mix_precision.fit(trained, conf, eval_dataloader=loader(data))
    assert set(formats(found).values()) == {"int8"}


@pytest.mark.filterwarnings("ignore:converted module by module")
def test_a_module_that_cannot_be_captured_says_so(data: TensorDataset) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum() > 0 else x

    with pytest.raises(UsageError, match="int8 needs the graph of the module"):
        quantization.fit(Branching(), PostTrainingQuantConfig(), loader(data))


@pytest.mark.filterwarnings("ignore:products on integers are wrong", "ignore:no op is in int8")
@pytest.mark.filterwarnings("ignore:.*keep fp32. planned in int8")
@pytest.mark.filterwarnings("ignore:nothing was converted")
def test_why_no_product_could_be_quantized(
    trained: nn.Module, data: TensorDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise EngineError("products on integers are wrong by 0.3 on this CPU", fix="VNNI")

    monkeypatch.setattr(planning, "unfused", fail)
    with pytest.raises(
        ModelError, match=r"to int8 \(planned in int8, PyTorch .* without VNNI"
    ):
        quantization.fit(trained, PostTrainingQuantConfig(**NO_BF16), loader(data))
