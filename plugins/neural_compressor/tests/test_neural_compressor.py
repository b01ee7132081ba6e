from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from finecast.data.criterion import Criterion, CriterionKind
from finecast.errors import FinecastError, ModelError, UsageError, UserCodeError
from finecast.numbers.formats import Format
from finecast.tuning.goal import Goal
from finecast_neural_compressor import (
    AccuracyCriterion,
    MixedPrecisionConfig,
    TuningCriterion,
    load,
    mix_precision,
)
from finecast_neural_compressor.mix_precision import fallback

_FP32 = {"weight": {"dtype": ["fp32"]}, "activation": {"dtype": ["fp32"]}}

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_BF16", "1")
    torch.manual_seed(0)


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()


def test_the_seed_s_first_example(tmp_path: Path) -> None:
    model = net()
    conf = MixedPrecisionConfig()  # default precision is bf16
    converted_model = mix_precision.fit(model, conf=conf)
    assert converted_model is not None
    converted_model.save(str(tmp_path / "save"))
    stored = torch.load(tmp_path / "save" / "best_model.pt")
    # Conv2d too, which INC leaves alone.
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        assert torch.allclose(converted_model.model(x), model(x), atol=0.05)


def test_the_seed_s_second_example_says_what_is_missing() -> None:
    conf = MixedPrecisionConfig(backend="onnxrt_cuda_ep", device="gpu", precisions="fp16")
    with pytest.raises(FinecastError, match="onnxrt_cuda_ep"):
        mix_precision.fit(net(), conf=conf)


def test_defaults_are_inc_s() -> None:
    conf = MixedPrecisionConfig()
    assert (conf.device, conf.backend, conf.precisions) == ("cpu", "default", "bf16")
    assert AccuracyCriterion() == AccuracyCriterion(True, "relative", 0.01)
    assert TuningCriterion() == TuningCriterion("basic", None, 0, 100, "performance")


def test_op_dicts_keep_ops_in_fp32() -> None:
    for conf in (
        MixedPrecisionConfig(op_type_dict={"Linear": _FP32}),
        MixedPrecisionConfig(op_name_dict={"3": _FP32}),
    ):
        result = mix_precision.fit(net(), conf)
        assert result is not None
        dtypes = {n.split(".")[0]: t.dtype for n, t in result.model.state_dict().items()}
        assert dtypes == {"0": torch.bfloat16, "3": torch.float32}


def test_no_trial_passes_gives_none_and_not_an_fp32_model() -> None:
    model, x = net(), torch.randn(16, 3, 8, 8)
    want = model(x)
    conf = MixedPrecisionConfig(accuracy_criterion=AccuracyCriterion(tolerable_loss=0.0))

    def exact(candidate: nn.Module) -> float:
        with torch.no_grad():
            return -float((candidate(x) - want).abs().max())

    with pytest.warns(UserWarning, match=r"fp32 has -?0, and none of \d+ trials kept it"):
        assert mix_precision.fit(model, conf, eval_func=exact) is None


def test_dataloader_and_metric() -> None:
    class Count:
        def reset(self) -> None:
            self.right = 0

        def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
            self.right += int((predictions.argmax(-1) == labels).sum())

        def result(self) -> float:
            return float(self.right)

    model, x = net(), torch.randn(8, 3, 8, 8)
    loader = [(x, model(x).argmax(-1))]
    result = mix_precision.fit(model, eval_dataloader=loader, eval_metric=Count())
    assert result is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"excluded_precisions": ["bf16"]}, "leave nothing"),
        ({"backend": "ipex"}, "discontinued"),
        ({"device": "tpu"}, "unknown device"),
        ({"device": "xpu"}, "not supported for PyTorch"),
        ({"backend": "itex"}, r"is for TensorFlow models.*default"),
        ({"backend": "onnxrt_dml_ep"}, r"DirectML.*all:fp16"),
        ({"inputs": "x"}, "a module does not have"),
        ({"quant_level": 2}, 'use "auto", 0 or 1'),
        ({"precision": "bf61"}, "unknown precision 'bf61': did you mean bf16"),
        ({"excluded_precisions": "fp61"}, "unknown precision"),
        ({"op_name_dict": {"4": _FP32}}, r"unknown op '4' \(op_name_dict\): use one of 0, "),
        ({"op_type_dict": {"Lineer": _FP32}}, "did you mean Linear"),
        # A pattern is for the whole name, not for its beginning or for a part of it.
        ({"op_type_dict": {"Line": _FP32}}, "unknown op 'Line'"),
        ({"op_type_dict": {"near": _FP32}}, "unknown op 'near'"),
        ({"op_type_dict": {"near|Li": _FP32}}, "unknown op"),
        (
            {"op_type_dict": {"Linear": {"weight": {"dtype": ["int8"]}}}},
            "unknown dtype 'int8'",
        ),
        ({"op_type_dict": {"Linear": {"bias": {"dtype": ["fp32"]}}}}, "unknown part"),
        ({"op_type_dict": {"Linear": {"weight": {"granularity": ["x"]}}}}, "quantization"),
        ({"tuning_criterion": TuningCriterion("basicc")}, "did you mean basic"),
        ({"tuning_criterion": TuningCriterion(max_trials=0)}, "leave no trial"),
        ({"tuning_criterion": TuningCriterion(objective="modelsize")}, "is not supported"),
        ({"tuning_criterion": TuningCriterion(objective=["speed"])}, "unknown objective"),
        ({"tuning_criterion": TuningCriterion(objective="accuracy")}, "a search has one"),
        (
            {"tuning_criterion": TuningCriterion(objective=["performance", "footprint"])},
            "a search has one",
        ),
    ],
)
def test_what_cannot_be_done_raises(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        mix_precision.fit(net(), MixedPrecisionConfig(**settings))  # type: ignore[arg-type]


def search(
    types: dict[str, str],
    evaluate: Callable[[frozenset[str]], float],
    *,
    baseline: float,
    criterion: Criterion,
    timeout_s: float | None = None,
    quant_level: str | int = "auto",
) -> frozenset[str] | None:
    """What stays in fp32 where ``evaluate`` gives the accuracy, as INC searches."""
    first = timeout_s is None
    goal = Goal(
        criterion=criterion, max_trials=100, timeout_s=timeout_s, first_is_enough=first
    )
    return fallback(types, lambda kept: (kept, evaluate(kept)), goal, baseline, quant_level)[0]


TENTH = Criterion(kind=CriterionKind.RELATIVE, tolerance=0.1)


def test_fallback_finds_the_one_bad_op() -> None:
    tried: list[frozenset[str]] = []
    types = {"a1": "A", "b1": "B", "b2": "B"}

    def evaluate(kept: frozenset[str]) -> float:
        tried.append(kept)
        return 1.0 if "b2" in kept else 0.5

    found = search(types, evaluate, baseline=1.0, criterion=TENTH)
    assert found == {"b1", "b2"}  # its type, the first trial that passes
    assert tried == [frozenset(), {"a1"}, {"b1", "b2"}]
    found = search(types, evaluate, baseline=1.0, criterion=TENTH, timeout_s=100)
    assert found == {"b2"}  # with time left, the fewest ops


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"model_name": "bert"}, "model_name"),
        ({"precisions": ["bf16", "fp16"]}, "bf16 is used"),
        ({"quant_level": 1}, "quant_level: without eval_func"),
        ({"accuracy_criterion": AccuracyCriterion(tolerable_loss=0.5)}, "accuracy_criterion"),
    ],
)
def test_what_has_no_effect_is_taken_and_said(settings: dict[str, object], what: str) -> None:
    with pytest.warns(UserWarning, match=what):
        result = mix_precision.fit(net(), MixedPrecisionConfig(**settings))  # type: ignore[arg-type]
    assert result.lowered == 2


def test_a_strategy_of_quantization_has_no_effect_and_it_is_said() -> None:
    conf = MixedPrecisionConfig(tuning_criterion=TuningCriterion("bayesian"))
    with pytest.warns(UserWarning, match="one strategy"):
        assert mix_precision.fit(net(), conf, eval_func=lambda model: 1.0) is not None


@pytest.mark.parametrize(
    ("quant_level", "expected"),
    [
        (0, [set(), {"a1"}, {"b1", "b2"}]),
        (1, [set(), {"a1"}, {"b1"}, {"b2"}, {"a1", "b1"}]),
        ("auto", [set(), {"a1"}, {"b1", "b2"}, {"b1"}, {"b2"}, {"a1", "b1"}]),
    ],
)
def test_quant_level_says_what_falls_back(
    quant_level: str | int, expected: list[set[str]]
) -> None:
    tried: list[frozenset[str]] = []

    def evaluate(kept: frozenset[str]) -> float:
        tried.append(kept)
        return 0.5

    types = {"a1": "A", "b1": "B", "b2": "B"}
    found = search(types, evaluate, baseline=1.0, criterion=TENTH, quant_level=quant_level)
    assert found is None
    assert tried == expected


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_the_op_that_costs_most_accuracy_falls_back_first(higher_is_better: bool) -> None:
    """By a loss, where lower is better, as by an accuracy."""
    costs = {"a": 1.0, "b": 4.0, "c": 2.0}
    tried: list[frozenset[str]] = []

    def evaluate(kept: frozenset[str]) -> float:
        tried.append(kept)
        loss = sum(cost for name, cost in costs.items() if name not in kept)
        return -loss if higher_is_better else loss

    one = Criterion(
        kind=CriterionKind.ABSOLUTE, tolerance=1.0, higher_is_better=higher_is_better
    )
    types = dict.fromkeys(costs, "Linear")
    assert search(types, evaluate, baseline=0.0, criterion=one) == {"b", "c"}
    assert tried == [frozenset(), {"a"}, {"b"}, {"c"}, {"b", "c"}]


class Attention(nn.Module):
    """Self-attention as a submodule, with the weights that it asks for or without."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, weights = self.attention(x, x, x)
        return out + weights.mean()


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
            2,
            enable_nested_tensor=True,
        ),
        Attention,
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_modules_whose_parents_read_their_weights(model: Callable[[], nn.Module]) -> None:
    net, x = model().eval(), torch.randn(3, 5, 16)
    result = mix_precision.fit(net)
    with torch.no_grad():
        assert torch.allclose(result(x), net(x), atol=0.05)
    if isinstance(net, Attention):
        return
    padded = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 5])
    with torch.no_grad():
        got, want = (m(x, src_key_padding_mask=padded) for m in (result, net))
    assert torch.allclose(got[~padded], want[~padded], atol=0.05)


def test_a_mask_of_fp32_s_lowest_number_does_not_become_infinite() -> None:
    model, x = nn.MultiheadAttention(16, 4).eval(), torch.randn(5, 2, 16)
    mask = torch.full((5, 5), torch.finfo(torch.float32).min).triu(1)
    mask[2] = torch.finfo(torch.float32).min  # beyond bf16's: a row of -Inf would give NaN
    result = mix_precision.fit(model)
    want, _ = model(x, x, x, attn_mask=mask)
    got, _ = result(x, x, x, attn_mask=mask)
    assert torch.isfinite(want).all()
    assert torch.allclose(got, want, atol=0.05)


def test_a_whole_transformer() -> None:
    model = nn.Transformer(16, 4, 1, 1, 32, batch_first=True).eval()
    source, target = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    result = mix_precision.fit(model)
    assert "encoder.layers.0.self_attn" in result.lowered_modules
    with torch.no_grad():
        assert torch.allclose(result(source, target), model(source, target), atol=0.1)


class Tied(nn.Module):
    """An embedding whose weight is the head's too, and a head that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.again = nn.ModuleList([self.head])
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens))
        return self.head(x) + self.again[0](x) + nn.functional.linear(x, self.head.weight)


def test_tied_weights_stay_fp32_elsewhere() -> None:
    model, tokens = Tied().eval(), torch.arange(11)[None]
    result = mix_precision.fit(model)
    with torch.no_grad():
        assert torch.allclose(result(tokens), model(tokens), atol=0.1)
    assert result.model.embedding.weight.dtype is torch.float32
    assert result.model.again[0] is result.model.head
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.dtype is torch.float32


class Shared(nn.Module):
    """One block that stands under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8))
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_a_module_within_a_shared_one_is_converted_once() -> None:
    result = mix_precision.fit(Shared())
    assert isinstance(result.model.second[0].inner, nn.Linear)


def test_each_name_of_a_module_is_known() -> None:
    conf = MixedPrecisionConfig(op_name_dict={"again.0": _FP32})
    result = mix_precision.fit(Tied(), conf)
    assert result.model.head.inner.weight.dtype is torch.bfloat16
    assert result.model.again[0].weight.dtype is torch.float32


def test_a_model_without_products_gains_nothing() -> None:
    with pytest.raises(ModelError, match="no matrix product or convolution"):
        mix_precision.fit(nn.Sequential(nn.ReLU()), MixedPrecisionConfig())
    with pytest.raises(ModelError, match="no matrix product or convolution"):
        mix_precision.fit(nn.ReLU(), eval_func=lambda model: 1.0)


def test_a_graph_planned_on_one_sample_takes_any_number_saved_and_loaded(
    tmp_path: Path,
) -> None:
    model = net()
    conf = MixedPrecisionConfig(precision="bf16", example_inputs=torch.randn(1, 3, 8, 8))
    result = mix_precision.fit(model, conf)
    assert "bf16" in result.model.finecast_plan.counts
    result.eval()
    result.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert (again.lowered, again.products) == (result.lowered, result.products)
    for size in (1, 2, 7):
        x = torch.randn(size, 3, 8, 8)
        with torch.no_grad():
            assert torch.allclose(result(x), model(x), atol=0.05)
            assert torch.equal(again(x), result(x))


def test_what_cannot_be_captured_is_converted_by_modules() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum() > 0 else x

    x = torch.ones(2, 4)
    with pytest.warns(UserWarning, match="module by module"):
        result = mix_precision.fit(Branching(), MixedPrecisionConfig(example_inputs=x))
    assert result.lowered_modules == {"layer": "Linear"}
    assert result(x).shape == (2, 4)


def test_save_and_load(tmp_path: Path) -> None:
    model, x = net(), torch.randn(3, 3, 8, 8)
    result = mix_precision.fit(model)
    result.save(tmp_path / "saved")
    torch.manual_seed(1)
    again = load(tmp_path / "saved", net())  # other weights, which the state replaces
    assert isinstance(result, nn.Module)
    with torch.no_grad():
        assert torch.equal(again(x), result(x))
    assert (again.lowered, again.products) == (result.lowered, result.products)
    with pytest.raises(UsageError, match="give the fp32 module"):
        load(tmp_path / "saved")
    with pytest.raises(ModelError, match="not of this module"):
        load(tmp_path / "saved", nn.Sequential(nn.Linear(2, 2)))
    (tmp_path / "saved" / "best_configure.json").write_text('{"version": 1}')
    with pytest.raises(ModelError, match="cannot be read"):
        load(tmp_path / "saved", model)
    with pytest.raises(UsageError, match="no model that"):
        load(tmp_path)


class Named(nn.Module):
    """Takes its inputs by keyword, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.layer(ids) * scale


class Agreement:
    """Share of batches of which the metric has seen the right number of rows."""

    def reset(self) -> None:
        self.rows = 0

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        assert predictions.shape[0] == labels.shape[0]
        self.rows += len(labels)

    def result(self) -> float:
        return float(self.rows)


def test_batches_as_dicts_of_unlike_sizes_from_a_generator() -> None:
    batches = (
        ({"ids": torch.randn(n, 4), "scale": torch.ones(n, 1)}, torch.zeros(n)) for n in (4, 2)
    )
    metric = Agreement()
    result = mix_precision.fit(Named().eval(), eval_dataloader=batches, eval_metric=metric)
    assert metric.rows == 6  # in the last trial, too
    assert "bf16" in result.model.finecast_plan.counts
    with pytest.raises(UsageError, match=r"has no reset\(\)"):
        mix_precision.fit(Named(), eval_dataloader=[], eval_metric="accuracy")


def test_what_is_no_accuracy_or_no_setting_is_one_error() -> None:
    with pytest.raises(UserCodeError, match=r"returns None .*eval_func"):
        mix_precision.fit(net(), eval_func=lambda model: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match="a MixedPrecisionConfig is expected for conf"):
        mix_precision.fit(net(), {"precision": "bf16"})  # type: ignore[arg-type]


def test_a_setting_that_there_is_not_is_one_error() -> None:
    given: dict[str, Any] = {"strategy": "mse"}
    with pytest.raises(UsageError, match=r"TuningCriterion\(strategy=") as caught:
        MixedPrecisionConfig(**given)
    assert "MixedPrecisionConfig has no setting 'strategy'" in str(caught.value)
    for settings, name, close in (
        (MixedPrecisionConfig, "precisoin", "precision"),
        (TuningCriterion, "time_out", "timeout"),
        (AccuracyCriterion, "tolerable_los", "tolerable_loss"),
    ):
        with pytest.raises(UsageError, match=f"setting {name!r}.*{close}"):
            settings(**cast("dict[str, Any]", {name: 1}))
    assert MixedPrecisionConfig("cpu", precisions="fp16").low() is Format.FP16


def test_models_of_other_frameworks_are_told_the_way() -> None:
    for model, message in (
        ("weights.h5", "give the Keras model, or a SavedModel"),
        ("model.tflite", "give the SavedModel that it was made from"),
        ("model.pt", "build the nn.Module"),
        ("model.pt2", "fit does not take.*: convert it with: finecast convert"),
        ("model.xml", "fit does not take.*: use finecast.convert"),
        (3, "cannot convert an int"),
    ):
        with pytest.raises(UsageError, match=message):
            mix_precision.fit(model)


def test_onnx_model(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = Path(__file__).parents[3] / "examples" / "digits" / "digits.onnx"
    result = mix_precision.fit(str(model))
    assert result is not None
    result.save(tmp_path / "low.onnx")
    stored = onnx.load(tmp_path / "low.onnx")
    types = {t.data_type for t in stored.graph.initializer}
    assert onnx.TensorProto.BFLOAT16 in types
