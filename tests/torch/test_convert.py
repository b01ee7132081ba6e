from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast
import finecast.torch as ft
from finecast import Policy
from finecast.engines.torch import rates
from finecast.errors import ModelError, RuleConflictError, UsageError
from finecast.frontends import torch as frontend
from finecast.native.torch import planning
from finecast.native.torch.planning import is_wrong
from finecast.numbers.formats import Format
from finecast.planning.edits import cast_count
from finecast.rules.guests import GUESTS
from tests.torch.errors import first_order, points_of, probed
from tests.torch.planned import plan_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.second(nn.functional.gelu(self.first(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.norm(self.conv(x)))
        y += 1
        return self.head(y.mean((2, 3)))


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return float((y - reference).norm() / reference.norm())


def test_inputs_and_outputs_keep_their_types_and_weights_are_stored_low() -> None:
    net, x = Block().eval(), torch.randn(4, 32)
    with torch.no_grad():
        want = net(x)
        low = ft.convert(net, (x,), "all:bf16")
        got = low(x)
    assert got.dtype is torch.float32
    assert 0 < error(got, want) < 20 * Format.BF16.unit_roundoff
    size = sum(t.nbytes for t in low.state_dict().values())
    assert size <= 0.55 * sum(t.nbytes for t in net.state_dict().values())
    assert all(p.dtype is torch.float32 for p in net.parameters())


def test_scope_none_is_the_identity() -> None:
    net, x = Block().eval(), torch.randn(4, 32)
    with torch.no_grad():
        same = ft.convert(net, (x,), "none:bf16")
        assert torch.equal(same(x), net(x))
    assert set(plan_of(same).counts) == {"fp32"}


def test_batch_norm_is_folded_and_in_place_ops_are_not_lost() -> None:
    net, x = Net(), torch.randn(2, 3, 8, 8)
    net(x)  # statistics that are not those of a fresh module
    net.eval()
    low = ft.convert(net, (x,), "matmult:bf16")
    with torch.no_grad():
        assert error(low(x), net(x)) < 4 * Format.BF16.unit_roundoff
    assert not any("batch_norm" in str(n.target) for n in low.graph.nodes)
    assert net.norm.weight.dtype is torch.float32


def test_the_residual_stream_stays_exact_beside_low_products() -> None:
    net = nn.Sequential(*(Block(64) for _ in range(3))).eval()
    x = torch.randn(8, 64)
    low = ft.convert(net, (x,))
    formats = {d.op: d.format for d in plan_of(low).decisions}
    assert formats["linear"] is Format.BF16
    with torch.no_grad():
        everything = ft.convert(net, (x,), "all:bf16")
        assert error(low(x), net(x)) <= error(everything(x), net(x))


def test_both_ways_of_measuring_sensitivity_agree() -> None:
    net, x = Block().eval(), torch.randn(16, 32)
    captured = frontend.capture(net, (x,))
    points = points_of(captured)
    one_pass = first_order(captured, points, [x], draws=8)
    assert len(points) > 5
    # Sums over points predict; single ones scatter with the random combination.
    assert one_pass.sum() == pytest.approx(probed(captured, points, [x]).sum(), rel=0.3)


def test_tied_weights_stay_one_tensor() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16, bias=False)
            self.b = nn.Linear(16, 16, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.relu(self.a(x)))

    low = ft.convert(Tied().eval(), (torch.randn(2, 16),), "all:bf16")
    storages = {t.untyped_storage().data_ptr() for t in low.state_dict().values()}
    assert len(storages) == 1


def test_dynamic_shapes_and_export_of_the_result() -> None:
    net, x = Block().eval(), torch.randn(4, 32)
    batch = torch.export.Dim("batch", min=2, max=64)
    low = ft.convert(net, (x,), "auto:bf16", ({0: batch},))
    assert low(torch.randn(9, 32)).shape == (9, 32)
    program = torch.export.export(low, (x,), dynamic_shapes=({0: batch},))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    assert torch.equal(again(x), low(x))


def test_a_slow_format_is_not_chosen_and_warned_about_when_named() -> None:
    net, x = Block().eval(), torch.randn(4, 32)
    with pytest.warns(UserWarning, match=r"fp16 runs at x0\.1.*no speed is gained here"):
        plan = plan_of(ft.convert(net, (x,), "auto:fp16"))
    assert set(plan.counts) == {"fp32"}
    with pytest.warns(UserWarning, match=r"fp16 runs at x0\.1"):
        named = ft.convert(net, (x,), "all:fp16")
    assert "fp16" in plan_of(named).counts


def test_of_several_formats_a_slow_one_is_left_out() -> None:
    net, x = Block().eval(), torch.randn(4, 32)
    with pytest.warns(UserWarning, match=r"skipped: fp16 runs at x0\.1"):
        plan = plan_of(ft.convert(net, (x,), "auto:fp16,bf16"))
    assert set(plan.counts) <= {"fp32", "bf16"}
    assert "bf16" in plan.counts
    assert plan.policy == "auto:bf16"


class Wide(nn.Module):
    """One product needs bf16's range, the other is better off with fp16's digits."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(64, 64, bias=False)
        self.large.weight.data *= 1e7
        self.small = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.large(x), self.small(x)


def test_formats_of_one_speed_are_mixed_by_range_and_digits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rate(device: str, fmt: Format, threads: int) -> rates.Rate:
        del device, threads
        speed = 1.0 if fmt is Format.FP32 else 4.0
        return rates.Rate(
            product_tflops=0.001 * speed, speed=speed, bandwidth_gb_s=50.0, overhead_s=1e-7
        )

    monkeypatch.setattr(rates, "rate", rate)
    net, x = Wide().eval(), torch.randn(256, 64)
    low = ft.convert(net, (x,), "auto:bf16,fp16")
    assert sorted(plan_of(low).formats.values(), key=lambda f: f.label) == [
        Format.BF16,
        Format.FP16,
    ]
    for got, wanted in zip(low(x), net(x), strict=True):
        assert torch.isfinite(got).all()
        assert (got - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.filterwarnings("ignore:fp16 runs at")
def test_rafs_lists_know_one_format() -> None:
    pytest.importorskip("finecast_raf")
    with pytest.raises(UsageError, match="takes one format, not all:bf16,fp16"):
        ft.convert(Block().eval(), (torch.randn(4, 32),), "all:bf16,fp16", rule_set="raf")


def test_every_decision_has_a_reason() -> None:
    low = ft.convert(Block().eval(), (torch.randn(4, 32),))
    assert all(d.reasons for d in plan_of(low).decisions)


def test_casts_are_shared_between_readers() -> None:
    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(x)
            total: Any = sum(torch.exp(p(y)) for p in self.parts)
            return total

    net, x = Fan().eval(), torch.randn(4, 16)
    captured = frontend.capture(net, (x,))
    plan = plan_of(ft.convert(net, (x,), "matmult:bf16"))
    edits = frontend.planned_edits(captured, plan)
    assert cast_count(captured.graph, edits) == 1 + 3


def test_finecast_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import finecast, sys; finecast.Format; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_is_refused_with_the_way_out() -> None:
    x = torch.ones(2, 4)
    traced: Any = torch.jit.trace(torch.nn.Linear(4, 4), x)
    for verb in (finecast.convert, finecast.inspect, ft.convert):
        given: dict[str, Any] = {"example_inputs": (x,)}
        with pytest.raises(
            UsageError, match=r"TorchScript.*give the module that it was made of"
        ):
            verb(traced, **given)


def test_an_unsupported_module_says_why() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if float(x.sum()) > 0 else -x

    with pytest.raises(ModelError, match=r"torch.export cannot capture"):
        ft.convert(Branches(), (torch.randn(2),))


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "tf32"])
def test_a_format_that_no_op_has_is_refused(fmt: str) -> None:
    net = nn.Linear(4, 4)
    with pytest.raises(UsageError, match=f"computes? in {fmt}"):
        ft.convert(net, (torch.randn(2, 4),), policy=f"all:{fmt}")


class Writing(nn.Module):
    """Writes to its input and, in a batch norm that always trains, to its state."""

    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.copy_(x @ self.weight)
        return nn.functional.batch_norm(x, self.mean, self.variance, training=True)


@pytest.mark.parametrize("policy", ["none", "auto:bf16", "all:bf16"])
def test_the_callers_inputs_and_state_stay_as_they_are(policy: str) -> None:
    net, x = Writing(), torch.randn(4, 8)
    given, state = x.clone(), {k: v.clone() for k, v in net.state_dict().items()}
    converted = ft.convert(net, (x,), policy)
    assert torch.equal(x, given)
    converted(x)  # writes to its own state and to what it is given
    assert not torch.equal(x, given)
    assert all(torch.equal(state[k], v) for k, v in net.state_dict().items())


def test_tune_leaves_them_alone_too() -> None:
    net, x = Writing(), torch.randn(4, 8)
    given, state = x.clone(), {k: v.clone() for k, v in net.state_dict().items()}
    options = ft.TuneOptions(prepare=lambda module: module, probing=True)
    ft.tune(
        net,
        (x,),
        evaluate=lambda module: 1.0,
        baseline=1.0,
        policy="auto:bf16",
        options=options,
    )
    assert torch.equal(x, given)
    assert all(torch.equal(state[k], v) for k, v in net.state_dict().items())


HALF = torch.float16


@pytest.mark.filterwarnings("ignore:fp16 runs at:UserWarning")  # as asked
@pytest.mark.parametrize("rule_set", ["finecast", *GUESTS])
@pytest.mark.parametrize(
    ("function", "casts"),
    [
        (lambda x, w: torch.relu(x.float()).to(HALF), 0),
        (lambda x, w: nn.functional.conv2d(x.float(), w.float()).to(HALF), 0),
        # Two results in fp32, and not one cast on the way to them.
        (lambda x, w: (torch.relu(x.float()), torch.neg(x.float())), 2),
    ],
)
def test_casts_of_the_source_end_where_types_meet(
    function: Callable[..., Any], casts: int, rule_set: str
) -> None:
    class Source(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> Any:
            return function(x, w)

    inputs = torch.randn(1, 3, 8, 8).to(HALF), torch.randn(4, 3, 3, 3).to(HALF)
    low = ft.convert(Source(), inputs, "all:fp16", rule_set=rule_set)
    found = [n for n in low.graph.nodes if "_to_copy" in str(n.target)]
    assert len(found) == casts
    want, got = Source()(*inputs), low(*inputs)
    torch.testing.assert_close(got, want)


def test_a_cast_that_rounds_stays() -> None:
    class Rounding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x.to(HALF).float())

    x = torch.randn(64) * 3
    low = ft.convert(Rounding(), (x,), "all:bf16")
    assert torch.equal(low(x), torch.relu(x.to(HALF).to(torch.bfloat16).float()))


class Positions(nn.Module):
    """Floats that come of integers alone, in the default type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(8) * 0.125
        return x @ (steps[:, None] * torch.full((1, 8), 0.5))


def test_ops_that_make_floats_of_integers_keep_the_default_type() -> None:
    x = torch.randn(8, 8)
    low = ft.convert(Positions(), (x,), "all:bf16")
    assert error(low(x), Positions()(x)) < 4 * Format.BF16.unit_roundoff
    assert any(d.format is Format.BF16 for d in plan_of(low).decisions)


class Sampled(nn.Module):
    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return nn.functional.grid_sample(torch.relu(x), grid, align_corners=False)


@pytest.mark.parametrize("known", [True, False])
def test_a_kernel_that_is_broken_is_not_used(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    if not known:  # found by running it
        monkeypatch.setattr("finecast.engines.faults.FAULTS", ())
    x, grid = torch.randn(1, 8, 64, 64), torch.rand(1, 64, 64, 2) * 2 - 1
    # By itself the rule on coordinates keeps it in fp32; the user's word sets that aside.
    forced = replace(Policy.parse("all:bf16"), op_formats={"grid_sample": Format.BF16})
    with pytest.raises(
        RuleConflictError, match="no working bf16 kernel for aten::grid_sampler"
    ):
        ft.convert(Sampled(), (x, grid), forced)
    low = ft.convert(Sampled(), (x, grid), "all:bf16")
    formats = {d.op: d.format.label for d in plan_of(low).decisions}
    assert formats == {"relu": "bf16", "grid_sample": "fp32"}
    assert error(low(x, grid), Sampled()(x, grid)) < 2 * Format.BF16.unit_roundoff


@pytest.mark.parametrize(
    ("low", "wide", "wrong"),
    [
        (torch.tensor([1.5]).bfloat16(), 1.0, True),
        (torch.tensor([torch.nan]).bfloat16(), 1.0, True),
        (torch.tensor([1.0]).bfloat16(), 1.003, False),
        (torch.tensor([torch.inf]).to(HALF), 1e6, False),  # the format's end, not the kernel's
        (torch.tensor([torch.nan]).bfloat16(), torch.nan, False),
    ],
)
def test_a_result_may_differ_by_roundings(low: torch.Tensor, wide: float, wrong: bool) -> None:
    assert is_wrong(low, torch.tensor([wide])) == wrong


@pytest.mark.parametrize(
    ("dtype", "label"), [(torch.float64, "fp64"), (torch.float16, "fp16")]
)
def test_ops_that_keep_their_own_type_are_told(dtype: torch.dtype, label: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).to(dtype)
    kept = rf"2 ops compute in {label} and keep it: .*float\(\)"
    with (
        pytest.warns(UserWarning, match="nothing was converted"),
        pytest.warns(UserWarning, match=kept),
    ):
        ft.convert(net, (torch.zeros(2, 4, dtype=dtype),), "all:bf16")


@pytest.mark.parametrize("policy", ["all:bf16", "auto:bf16"])
def test_ops_without_a_kernel_keep_fp32(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    net, x = Block().eval(), torch.randn(4, 32)
    lowered = plan_of(ft.convert(net, (x,), policy)).decisions
    assert {d.format for d in lowered if d.op == "linear"} == {Format.BF16}
    found = iter([frozenset({"aten::linear"}), frozenset[str]()])
    monkeypatch.setattr(planning, "missing_kernels", lambda *_: next(found))
    kept = plan_of(ft.convert(net, (x,), policy)).decisions
    assert {d.format for d in kept if d.op == "linear"} == {Format.FP32}


def test_a_kernel_that_is_missing_in_fp32_too_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "missing_kernels", lambda *_: frozenset({"aten::linear"}))
    with pytest.raises(ModelError, match="does not run: aten::linear"):
        ft.convert(Block().eval(), (torch.randn(4, 32),), "all:bf16")


class Picked(nn.Module):
    def forward(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return rows[ids].relu()


def test_indices_do_not_follow_the_format_of_what_they_pick() -> None:
    captured = frontend.capture(Picked(), (torch.randn(8, 4), torch.tensor([1, 2])))
    picked, relu = captured.graph.float_nodes
    assert (picked.follows_in, picked.follows_out) == ((True, False), (True,))
    assert relu.follows_in == (True,)


class Folded(nn.Module):
    """A norm that is folded into a convolution, and a product that becomes a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.weight = nn.Parameter(torch.randn(8, 5))
        self.bias = nn.Parameter(torch.randn(5))
        self.norm.running_mean, self.norm.running_var = torch.randn(8), torch.rand(8) + 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu().mean((2, 3)) @ self.weight + self.bias


def test_a_plan_that_lowers_nothing_changes_no_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Folded().eval(), torch.randn(2, 3, 12, 12)
    policy = Policy(exclude=(re.compile(""),))
    with torch.no_grad():
        wanted = module(x)
        low = ft.convert(module, (x,), policy)
        assert not plan_of(low).lowers
        assert torch.equal(low(x), wanted)
    saved = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(module, (x,)), saved)
    done = finecast.convert(saved, tmp_path / "low.pt2", policy)
    assert done.verified.max_abs_error == 0
    assert torch.equal(torch.export.load(tmp_path / "low.pt2").module()(x), wanted)


class Masked(nn.Module):
    """An encoder layer with a mask: ops on masks round nothing in any format."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layer(x, src_key_padding_mask=mask)


def test_auto_leaves_a_module_that_would_gain_a_hair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "finecast.native.torch.model.predicted_cost", lambda *_: 0.0
    )  # of the plan in fp32: all others take longer
    torch.manual_seed(0)
    net, x = Masked().eval(), torch.randn(2, 6, 32)
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[0, 4:] = True
    low = ft.convert(net, (x, mask))
    plan = low.finecast_plan
    assert plan is not None
    assert not plan.low_formats
    assert torch.equal(low(x, mask), net(x, mask))
