from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from finecast.compat.neural_compressor import (  # noqa: E402
    AccuracyCriterion,
    MixedPrecisionConfig,
    TuningCriterion,
    mix_precision,
)
from finecast.compat.neural_compressor.fallback import Fallback  # noqa: E402
from finecast.errors import FinecastError, UsageError  # noqa: E402
from finecast.measure.criterion import Criterion, CriterionKind  # noqa: E402

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
    assert TuningCriterion() == TuningCriterion("basic", 0, 100, "performance")


def test_op_dicts_keep_ops_in_fp32() -> None:
    fp32 = {"weight": {"dtype": ["fp32"]}, "activation": {"dtype": ["fp32"]}}
    for conf in (
        MixedPrecisionConfig(op_type_dict={"Linear": fp32}),
        MixedPrecisionConfig(op_name_dict={"3": fp32}),
    ):
        result = mix_precision.fit(net(), conf)
        assert result is not None
        dtypes = {n.split(".")[0]: t.dtype for n, t in result.model.state_dict().items()}
        assert dtypes == {"0": torch.bfloat16, "3": torch.float32}


def test_a_planned_graph_where_there_are_inputs() -> None:
    x = torch.randn(2, 3, 8, 8)
    result = mix_precision.fit(net(), MixedPrecisionConfig(example_inputs=x))
    assert result is not None
    assert "bf16" in result.model.finecast_plan.counts


def test_no_trial_passes_gives_none_and_not_an_fp32_model() -> None:
    model, x = net(), torch.randn(16, 3, 8, 8)
    want = model(x)
    conf = MixedPrecisionConfig(accuracy_criterion=AccuracyCriterion(tolerable_loss=0.0))

    def exact(candidate: nn.Module) -> float:
        with torch.no_grad():
            return -float((candidate(x) - want).abs().max())

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
        ({"inputs": ["x"]}, "a module does not have"),
    ],
)
def test_what_cannot_be_done_raises(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        mix_precision.fit(net(), MixedPrecisionConfig(**settings))  # type: ignore[arg-type]


def test_fallback_finds_the_one_bad_op() -> None:
    tried: list[frozenset[str]] = []

    def evaluate(kept: frozenset[str]) -> float:
        tried.append(kept)
        return 1.0 if "b2" in kept else 0.5

    search: Fallback[frozenset[str]] = Fallback(
        types={"a1": "A", "b1": "B", "b2": "B"},
        build=lambda kept: kept,
        counts=lambda model: True,
        evaluate=evaluate,
        criterion=Criterion(kind=CriterionKind.RELATIVE, tolerance=0.1),
        tuning=TuningCriterion(),
    )
    assert search.search(1.0) == {"b1", "b2"}  # its type, the first trial that passes
    assert tried == [frozenset(), {"a1"}, {"b1", "b2"}]
    search.scores.clear()
    search.tuning = TuningCriterion(timeout=100)
    assert search.search(1.0) == {"b2"}  # with time left, the fewest ops


def test_onnx_model(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = Path(__file__).parents[2] / "examples" / "digits" / "digits.onnx"
    result = mix_precision.fit(str(model))
    assert result is not None
    result.save(tmp_path / "low.onnx")
    stored = onnx.load(tmp_path / "low.onnx")
    types = {t.data_type for t in stored.graph.initializer}
    assert onnx.TensorProto.BFLOAT16 in types
