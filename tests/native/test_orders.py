"""Metric and error over orders of summation, and plans that keep a limit in too few."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import finecast
from finecast.api.requests import device_for
from finecast.cli import main
from finecast.devices.choice import CastRequest, choose
from finecast.devices.emulation import explicit_casts, setting_of
from finecast.errors import UsageError
from finecast.native import orders as native_orders
from finecast.native.orders import InOrder, OrderSpread
from finecast.numbers.formats import Format
from finecast.numbers.rounding import round_to
from finecast.numbers.summation import Order, Scheme, Summation, orders
from finecast.rules.policy import Policy, Scope
from tests.frontends.tools import parse, tensor

TERMS = 4096


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """Sums of 4096 ones, beside 3000 in one term: fp16 adds no 1 to 2048."""
    weights = np.zeros((TERMS, 64), np.float32)
    weights[:, 0], weights[0, 1] = 1, 3000
    model = parse(f"net (float[n,{TERMS}] x) => (float[n,64] y) {{ y = MatMul(x, w) }}")
    model.graph.initializer.append(tensor("w", weights))
    path = tmp_path / "deep.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Half of the samples have 6000 in that term, and are of its class."""
    x = np.ones((16, TERMS), np.float32)
    x[::2, 0] = 2
    np.savez(tmp_path / "data.npz", x=x, label=np.arange(16) % 2 == 0)
    return tmp_path / "data.npz"


def test_a_narrow_accumulator_has_a_wide_interval(deep: Path, data: Path) -> None:
    report = finecast.emulate(deep, "neoverse-v1", "matmult:fp16", data=data, metric="top1")
    assert report.metric == 1  # of sums that are rounded once
    by_order = {run.order.scheme: run.metric for run in report.orders.runs}
    assert by_order == {
        Scheme.SEQUENTIAL: 0.5,
        Scheme.REVERSED: 0.5,
        Scheme.PAIRWISE: 1,
        Scheme.SHUFFLED: 0.5,
    }
    assert report.orders.metric == (0.5, 1)
    least, most = report.orders.error
    assert least < Format.FP16.epsilon < 0.1 < most
    assert "in 10 orders of summation: top1 0.5 to 1, relative output error 0.0" in str(report)
    told = report.to_dict()["orders"]
    assert (told["metric"], told["summed_ops"], told["other_ops"]) == ([0.5, 1], 1, 0)
    assert [run["order"] for run in told["runs"]][:4] == [
        *("sequential", "reversed", "pairwise", "shuffled 0"),
    ]


def test_exact_sums_have_no_interval(deep: Path, data: Path) -> None:
    report = finecast.emulate(deep, "sm80", "matmult:fp16", data=data, metric="top1")
    assert report.orders.metric == (1, 1)
    assert "(the order changes nothing here)" in str(report)
    assert "blocked" in [run.order.label for run in report.orders.runs]


@pytest.mark.parametrize(
    ("share", "improved"), [(":0", True), (":10%", True), (":0.5", False), ("", False)]
)
def test_a_plan_is_taken_if_it_keeps_the_limit_in_enough_orders(
    deep: Path, data: Path, share: str, improved: bool
) -> None:
    result = finecast.tune(
        deep,
        policy="matmult:fp16",
        target=f"neoverse-v1{share}",
        data=data,
        metric="top1",
        max_drop=0.01,
    )
    assert result.improved == improved
    if not improved:
        assert (
            "of 1 plan within it here at most 1 of 10 orders of summation keep it"
            in result.why
        )
    elif share == ":10%":
        assert result.orders.kept == 1
        assert "1 of 10 keep your limit (10% asked for)" in str(result)
        assert result.to_dict()["orders"]["share"] == 0.1
        assert result.report().content["result"]["orders"]["kept"] == 1
    else:
        assert not result.orders.runs
        assert "orders of summation" not in str(result)


def test_the_command_line_tells_the_interval(
    deep: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cast = ["--auto-cast", "matmult", "--auto-cast-type", "fp16"]
    of = ["--data", str(data), "--metric", "top1", "--json"]
    assert main(["emulate", str(deep), "--target", "neoverse-v1:0.8", *cast, *of]) == 0
    told = json.loads(capsys.readouterr().out)["orders"]
    assert (told["share"], told["metric"], told["kept"]) == (0.8, [0.5, 1], 10)


def test_weights_may_lie_in_a_file_of_their_own(deep: Path, data: Path) -> None:
    """Others than those of products, too, which the parts of the model read."""
    model = onnx.load(deep)
    model.graph.node[0].output[0] = "p"
    model.graph.node.add(op_type="Add", input=["p", "b"], output=["y"])
    model.graph.initializer.append(tensor("b", np.zeros((1, 64), np.float32)))
    models = [deep.with_name(name) for name in ("whole.onnx", "apart.onnx")]
    onnx.save(model, models[0])
    apart: dict[str, Any] = {"location": "apart.bin", "size_threshold": 0}
    onnx.save(model, models[1], save_as_external_data=True, **apart)
    given: dict[str, Any] = {"policy": "matmult:fp16", "data": data, "metric": "top1"}
    whole, other = (finecast.emulate(m, "neoverse-v1", **given).orders for m in models)
    assert whole.runs == other.runs
    assert len(whole.runs) == native_orders.TRIED


def test_what_would_take_long_is_tried_if_it_is_asked_for(
    deep: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_orders, "_UNASKED", 1e6)

    def orders_of(target: str) -> OrderSpread:
        cast = "matmult:fp16"
        return finecast.emulate(deep, target, cast, data=data, metric="top1").orders

    spread = orders_of("sm80")
    assert not spread.runs
    # 4096 * 64 products of each sample, in 10 orders, for the error and for the metric.
    terms = TERMS * 64 * 10 * 2 * 16
    assert f"as {terms:.2g} additions take long (--target sm80:90%" in spread.why
    assert spread.holds
    assert len(orders_of("sm80:0.5").runs) == native_orders.TRIED


def test_users_functions_are_asked_if_it_is_asked_for(deep: Path, data: Path) -> None:
    x = np.load(data)["x"]

    def score(run: Any) -> float:
        return float((run({"x": x})["y"].argmax(1) == np.load(data)["label"]).mean())

    given: dict[str, Any] = {"evaluate": score, "policy": "matmult:fp16"}
    spread = finecast.emulate(deep, "neoverse-v1", **given).orders
    assert "the number of samples is not known" in spread.why
    assert finecast.emulate(deep, "neoverse-v1:1", **given).orders.metric == (0.5, 1)


def test_where_no_order_can_be_chosen_none_is_tried(deep: Path, data: Path) -> None:
    model = onnx.load(deep)
    model.graph.node[0].op_type = "Einsum"
    model.graph.node[0].attribute.add(name="equation", s=b"nk,km->nm", type=3)
    onnx.save(model, deep)
    given: dict[str, Any] = {"policy": "matmult:fp16", "data": data, "metric": "top1"}
    spread = finecast.emulate(deep, "neoverse-v1:1", **given).orders
    assert (spread.runs, spread.sums, spread.others) == ((), 0, 1)
    assert "of none of the ops that sum" in spread.why
    assert spread.holds


def test_models_of_openvino_add_up_in_the_same_orders(
    deep: Path, data: Path, tmp_path: Path
) -> None:
    openvino = pytest.importorskip("openvino")
    net = tmp_path / "deep.xml"
    openvino.save_model(openvino.convert_model(deep), net, compress_to_fp16=False)
    given: dict[str, Any] = {"policy": "matmult:fp16", "data": data, "metric": "top1"}
    own, other = (finecast.emulate(m, "neoverse-v1:0.9", **given).orders for m in (net, deep))
    assert own.runs == other.runs
    assert len(own.runs) == native_orders.TRIED


@pytest.mark.parametrize("order", orders(5, blocked=True), ids=lambda order: order.label)
def test_layers_of_openvino_give_the_numbers_of_onnxs(order: Order, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    rng = np.random.default_rng(0)
    model = parse(
        """net (float[n,2,9,8] x) => (float[n,5] y) {
        k = Conv<group = 2, pads = [1, 1, 1, 1]>(x, u)
        c = Conv<strides = [2, 1], pads = [1, 0, 0, 2], dilations = [1, 2]>(k, w, b)
        m = ReduceMean<axes = [3], keepdims = 0>(c)
        f = Flatten(m)
        y = Gemm<transB = 1>(f, v, d)
        }"""
    )
    shapes = {"u": (2, 1, 3, 3), "w": (6, 2, 3, 4), "b": (6,), "v": (5, 24), "d": (5,)}
    for name, shape in shapes.items():
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(tensor(name, array))
    paths = tmp_path / "net.onnx", tmp_path / "net.xml"
    onnx.save(model, paths[0])
    openvino.save_model(openvino.convert_model(paths[0]), paths[1], compress_to_fp16=False)
    how = replace(explicit_casts("sm80"), scope=Scope.MATMULT, order=order)
    x = rng.standard_normal((3, 2, 9, 8)).astype(np.float32)
    results: list[NDArray[Any]] = []
    for path in paths:
        program = finecast.load(path).program(how)
        session = program.session(how, setting_of(program.graph, how))
        assert session.summed == 4
        results.append(np.asarray(session.run({"x": x})["y"], np.float32))
    own, other = results
    np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("order", orders(5, blocked=True), ids=lambda order: order.label)
def test_a_pytorch_program_adds_up_in_order(order: Order) -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Conv1d(2, 6, 3, padding=1)
            self.last = torch.nn.Linear(6, 4)

        def forward(self, x: Any) -> Any:
            return self.last(self.inner(x).mean(-1))

    torch.manual_seed(0)
    net = Net()
    model = finecast.load(net, example_inputs=(torch.randn(3, 2, 20),))
    how = replace(explicit_casts("sm80"), scope=Scope.MATMULT, order=order)
    program = model.program(how)
    session = program.session(how, setting_of(program.graph, how))
    assert session.summed == 3
    x = np.random.default_rng(1).standard_normal((3, 2, 20)).astype(np.float32)
    (got,) = session.run({session.inputs[0].name: x}).values()
    own = {
        name: round_to(p.detach().numpy(), Format.BF16) for name, p in net.named_parameters()
    }
    exact = {name: p.detach().numpy() for name, p in net.named_parameters()}
    padded = np.pad(round_to(x, Format.BF16), [(0, 0), (0, 0), (1, 1)])
    rows = np.stack([padded[:, :, i : i + 3].reshape(3, 6) for i in range(20)], 1)
    by = Summation(order=order, block=16)
    inner = product(by, rows.reshape(60, 6), own["inner.weight"].reshape(6, 6).T)
    inner = inner.reshape(3, 20, 6) + exact["inner.bias"]
    mean = replace(by, block=0).sums(inner.transpose(1, 0, 2)) / np.float32(20)
    last = product(by, round_to(mean, Format.BF16), own["last.weight"].T)
    assert np.array_equal(got, last + exact["last.bias"])


def product(by: Summation, a: NDArray[np.float32], b: NDArray[np.float32]) -> Any:
    return by.products(a[None], b[None])[0]


def test_a_share_is_read_with_the_device() -> None:
    request = CastRequest(target="H100:95%")
    assert (request.target, request.share) == ("sm90", 0.95)
    emulation = choose(request).emulation
    assert emulation is not None
    assert emulation.share == 0.95
    assert explicit_casts("sm90").share is None
    with pytest.raises(UsageError, match="no orders of summation are tried here"):
        device_for(Policy(), "sm90:0.9")
    for wrong in ("sm90:2", "sm90:many", "sm90:"):
        with pytest.raises(UsageError, match="is not a number"):
            CastRequest(target=wrong)


@pytest.mark.parametrize(
    ("kept", "share", "holds"),
    [(9, 0.9, True), (8, 0.9, False), (10, 1, True), (9, 1, False), (1, 0.1, True)],
)
@pytest.mark.parametrize("higher", [True, False])
def test_a_share_of_orders(kept: int, share: float, holds: bool, *, higher: bool) -> None:
    """One metric decides: it keeps the limit of 0 if and only if enough orders do."""
    sign = 1 if higher else -1
    runs = (
        InOrder(order=order, metric=sign * (kept - number - 0.5), error=0, keeps=number < kept)
        for number, order in enumerate(orders(10, blocked=False))
    )
    spread = OrderSpread(runs=tuple(runs), share=share)
    assert spread.holds == holds
    deciding = spread.deciding(higher_is_better=higher)
    assert deciding is not None
    assert (sign * deciding >= 0) == holds
    assert OrderSpread(share=share).deciding(higher_is_better=higher) is None
