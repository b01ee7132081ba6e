"""INC's metrics and data loaders, by which its examples state an evaluation."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree

from finecast.errors import ModelError, UsageError
from finecast.numbers.formats import Format
from finecast_neural_compressor import (
    AccuracyCriterion,
    Metric,
    MixedPrecisionConfig,
    PostTrainingQuantConfig,
    data,
    load,
    mix_precision,
)
from finecast_neural_compressor.data import DataLoader, Datasets, DefaultDataLoader

SCORES = np.array([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4], [0.3, 0.3, 0.4], [0.9, 0.1, 0.0]])
LABELS = np.array([1, 2, 0, 0])


@pytest.mark.parametrize(("k", "share"), [(1, 0.5), (2, 1.0), (3, 1.0)])
def test_topk(k: int, share: float) -> None:
    metric = Metric(name="topk", k=k)
    metric.update(SCORES, LABELS)
    assert metric.result() == share
    metric.reset()
    metric.update([SCORES], np.eye(3)[LABELS])  # a list of outputs, labels as scores
    assert metric.result() == share
    metric.reset()
    metric.update(torch.tensor(SCORES, requires_grad=True), torch.tensor(LABELS)[:, None])
    assert metric.result() == share


def test_metrics_by_name() -> None:
    accuracy = Metric(name="Accuracy")
    accuracy.update(SCORES, LABELS)
    accuracy.update(np.array([2, 0]), np.array([2, 1]))
    assert accuracy.result() == 0.5
    for name, want in (("MAE", 1.5), ("MSE", 2.5), ("RMSE", 2.5**0.5)):
        distance = Metric(name)
        distance.update(np.zeros((1, 2)), np.array([[1.0, -2.0]]))
        assert distance.result() == pytest.approx(want)
    with pytest.raises(UsageError, match=r"metric 'topq'.*topk"):
        Metric(name="topq")
    with pytest.raises(UsageError, match=r"metric 'topk'.*n"):
        Metric(name="topk", n=1)


@given(st.integers(1, 7), st.integers(1, 12))
def test_a_metric_does_not_depend_on_batches(size: int, count: int) -> None:
    draw = np.random.default_rng(0)
    scores, labels = draw.uniform(size=(count, 4)), draw.integers(0, 4, count)
    metric = Metric(name="topk", k=2)
    for batch, truth in DefaultDataLoader([*zip(scores, labels, strict=True)], size):
        metric.update(batch, truth)
    whole = Metric(name="topk", k=2)
    whole.update(scores, labels)
    assert metric.result() == pytest.approx(whole.result())


def test_a_metric_of_the_users_own() -> None:
    class Last:
        def __init__(self, offset: float) -> None:
            self.value = self.offset = offset

        def reset(self) -> None:
            self.value = self.offset

        def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
            self.value += float(predictions.sum() - labels.sum())

        def result(self) -> float:
            return self.value

    metric = Metric(metric_cls=Last, offset=2.0)
    metric.update(np.ones(3), np.ones(2))
    assert metric.result() == 3.0
    metric.reset()
    assert metric.result() == 2.0


def test_batches() -> None:
    dataset = Datasets("pytorch")["dummy"](shape=(5, 3, 2), low=0.0, high=1.0)
    loader = DataLoader("pytorch", dataset, batch_size=2)
    sizes = [(inputs.shape, labels.shape) for inputs, labels in loader]
    assert sizes == [((2, 3, 2), (2,)), ((2, 3, 2), (2,)), ((1, 3, 2), (1,))]
    assert len([*loader]) == 3  # a second pass
    assert len([*DefaultDataLoader(dataset, 2, last_batch="discard")]) == 2
    several = Datasets("onnxrt_qdq")["dummy"]([(4, 2), (4, 1)], dtype=["float32", "int64"])
    ((first, second), labels) = next(iter(DataLoader("onnxrt_qdq", several, batch_size=4)))
    assert (first.shape, second.dtype, labels.tolist()) == ((4, 2), np.int64, [0] * 4)
    named = next(iter(DefaultDataLoader([{"x": np.zeros(2)}, {"x": np.ones(2)}], 2)))
    assert named["x"].shape == (2, 2)


def test_readers_that_are_not_here_say_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"TensorflowImageRecord is not here.*tf.data"):
        data.TensorflowImageRecord  # noqa: B018
    with pytest.raises(UsageError, match="ImageRecord is not here"):
        Datasets("tensorflow")["ImageRecord"]
    with pytest.raises(UsageError, match="framework 'torch'"):
        DataLoader("torch", [])


def test_an_example_of_inc_runs() -> None:
    torch.manual_seed(0)
    dataset = Datasets("pytorch")["dummy"](shape=(8, 64))
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    low = mix_precision.fit(
        net.eval(),
        MixedPrecisionConfig(),
        eval_dataloader=DataLoader("pytorch", dataset, batch_size=4, collate_fn=_tensors),
        eval_metric=Metric(name="topk", k=1),
    )
    assert low is not None
    assert low.products == 2


def _tensors(batch: list[tuple[np.ndarray, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = zip(*batch, strict=True)
    return torch.tensor(np.stack(inputs)), torch.tensor(labels)


def test_a_loss_of_everything_is_refused() -> None:
    whole = AccuracyCriterion(tolerable_loss=2)
    for conf in (MixedPrecisionConfig(accuracy_criterion=whole), PostTrainingQuantConfig()):
        conf.accuracy_criterion = whole
        with pytest.raises(UsageError, match=r"tolerable_loss=2 is 200%.*0.02 for 2%"):
            conf.check()
    for fine in (
        AccuracyCriterion(tolerable_loss=2, criterion="absolute"),
        AccuracyCriterion(tolerable_loss=2, higher_is_better=False),
    ):
        assert fine.to_criterion().tolerance == 2


def test_fp16_is_quantized_beside_int8_on_gpus() -> None:
    both = (Format.INT8, Format.BF16)
    assert PostTrainingQuantConfig().formats == both
    assert PostTrainingQuantConfig(device="gpu").formats == (*both, Format.FP16)
    named = MixedPrecisionConfig(
        device="gpu", backend="onnxrt_cuda_ep", precisions="int8,fp16"
    ).quantization()
    assert named.formats == (Format.INT8, Format.FP16)
    assert MixedPrecisionConfig(precisions="int8").quantization().formats == (Format.INT8,)


PACKAGE = "outputs_of_a_library"
SOURCE = f"""
import dataclasses
import torch

@dataclasses.dataclass
class Output:
    logits: torch.Tensor

torch.export.register_dataclass(Output, serialized_type_name="{PACKAGE}.Output")
"""


class Library(torch.nn.Module):
    """A module that gives a class of a package, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> object:
        return importlib.import_module(PACKAGE).Output(self.inner(x))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / f"{PACKAGE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module(PACKAGE)
    yield
    module = sys.modules.pop(PACKAGE, None)
    if module is not None:
        _pytree._deregister_pytree_node(module.Output)
        _pytree.treespec_loads.cache_clear()


@pytest.mark.usefixtures("package")
def test_a_saved_module_that_gives_a_class_is_loaded_if_trusted(tmp_path: Path) -> None:
    x = torch.randn(4, 64)
    low = mix_precision.fit(Library().eval(), MixedPrecisionConfig(example_inputs=x))
    low.save(tmp_path / "saved")
    with pytest.raises(ModelError, match="trust=True"):
        load(tmp_path / "saved")
    again = load(tmp_path / "saved", trust=True)
    assert torch.equal(again(x).logits, low(x).logits)
