"""Training through Inductor.

Those that are about kernels, numbers and memory build them, a few seconds each; the others
are about what the graphs compute, and run op by op.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import finecast.torch as ft
from finecast import rules
from finecast.planning.plan import Plan
from finecast_training.backend import Backend
from plugins.training.tests.uncompiled import kernels_that_compute_nothing

pytestmark = [
    pytest.mark.slow,
    # torch's own code warns about torch's own code.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

# bf16 rounds weights, activations and gradients once each, about four roundings of 2**-8 in
# turn; activations near 0 that change sides of a ReLU bring as much again, at most four times.
# (Seen: 0.038 behind a batch norm.)
TOLERANCE = 16 * 2.0**-8


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


class Mlp(nn.Module):
    def __init__(
        self, *, norm: bool = False, dropout: float = 0.0, again: bool = False
    ) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.norm = nn.BatchNorm1d(256) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(256, 64)
        self.again = again

    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x))
        y = F.relu(y, inplace=True)
        return self.second(self.dropout(y))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)
        return F.mse_loss(y.view(-1, 64), x)


def gradients(net: nn.Module, call: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    call(x).backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def close(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b) > 0
    for got, want in zip(a, b, strict=True):
        assert got.dtype is torch.float32
        scale = want.norm() + 1e-3  # a bias before a norm has no gradient
        assert float((got - want).norm() / scale) < TOLERANCE


@pytest.mark.parametrize("kind", ["plain", "batch norm", "checkpoint"])
def test_gradients_are_fp32_and_those_of_fp32(
    kind: str, request: pytest.FixtureRequest
) -> None:
    if kind != "batch norm":  # the kernels of one are those of all
        request.getfixturevalue("op_by_op")
    net = Mlp(norm=kind == "batch norm", again=kind == "checkpoint")
    other, x = copy.deepcopy(net), torch.randn(128, 64)
    compiled = ft.compile(net, "matmult:bf16")
    close(gradients(net, compiled, x), gradients(other, other, x))
    (plan,) = compiled.finecast_plans
    assert plan.counts["bf16"] >= 5  # two products forwards, three backwards
    if kind == "batch norm":
        mean, wanted = (n.norm.get_buffer("running_mean") for n in (net, other))
        assert torch.allclose(mean, wanted, atol=0.01)
        assert mean.dtype is torch.float32


@pytest.mark.usefixtures("op_by_op")
def test_dropout_drops() -> None:
    net, x = Mlp(dropout=0.5), torch.randn(128, 64)
    compiled = ft.compile(net, "all:bf16")
    assert float(compiled(x)) != float(compiled(x))


@pytest.mark.usefixtures("op_by_op")
def test_cached_weights_notice_the_optimizer() -> None:
    net, x = Mlp(), torch.randn(128, 64)
    other = copy.deepcopy(net)
    compiled = ft.compile(net, "matmult:bf16", accumulation=True)
    for model, call in ((net, compiled), (other, other)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            for part in x.split(64):
                call(part).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert float(compiled(x)) == pytest.approx(float(other(x)), rel=TOLERANCE)
    # Two weights and two biases at most, once for each of three steps and the last call.
    cache = compiled.finecast_backend.cache
    assert cache is not None
    assert 2 * 4 <= cache.casts <= 4 * 4
    # The weights themselves, which layers read transposed, are among the copies.
    assert compiled.finecast_backend.kept_bytes >= 2 * sum(
        p.numel() for p in net.parameters() if p.ndim == 2
    )


@pytest.mark.usefixtures("op_by_op")
def test_gradients_are_added_as_autograd_adds_them() -> None:
    net, x = Mlp(), torch.randn(128, 64)
    compiled = ft.compile(net, "matmult:bf16", accumulation=True)
    parts = x.split(64)
    alone = [[g.clone() for g in gradients(net, compiled, part)] for part in parts]
    net.zero_grad()
    for part in parts:
        compiled(part).backward()
    # The sum of two microbatches is rounded once more, in fp32.
    for p, one, other in zip(net.parameters(), *alone, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, one + other, rtol=1e-5, atol=1e-7)
    # What is asked for by itself comes by itself, and leaves what is there alone.
    before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    asked = torch.autograd.grad(compiled(parts[0]), list(net.parameters()))
    for got, want in zip(asked, alone[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    for p, want in zip(net.parameters(), before, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, want)
    # So does what a hook sees.
    seen: list[torch.Tensor] = []
    net.second.weight.register_hook(lambda g: seen.append(g.clone()))
    compiled(parts[0]).backward()
    torch.testing.assert_close(seen[0], alone[0][2], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        net.second.weight.grad, before[2] + alone[0][2], rtol=1e-5, atol=1e-7
    )


def test_the_least_memory_has_no_low_copies_of_weights() -> None:
    net, x = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))), torch.randn(32, 512)
    compiled = ft.compile(net, "matmult:bf16", memory="least")
    compiled(x).sum().backward()
    outputs: list[torch.Tensor] = []
    peak = ft.activation_bytes(lambda: outputs.append(compiled(x)))
    assert peak < 4 * 512 * 512 * 2  # of six copies a few live at a time
    net.zero_grad()
    step = ft.activation_bytes(lambda: compiled(x).sum().backward())
    assert step < 4 * 512 * 512 * 2


def test_a_large_head_takes_no_more_memory_than_under_autocast() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(4000, 64)
            self.head = nn.Linear(64, 4000)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self.words(ids)), ids)

    def autocast(net: nn.Module) -> Callable[..., torch.Tensor]:
        def call(ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return net(ids)

        return torch.compile(call)

    net, ids = Head(), torch.randint(0, 4000, (96,))  # more tokens than a row
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "autocast": autocast,
        "auto": ft.compile,
        "least": lambda m: ft.compile(m, memory="least"),
        "raf": lambda m: ft.compile(m, rule_set="raf"),
        "all": lambda m: ft.compile(m, "all:bf16"),
        "matmult": lambda m: ft.compile(m, "matmult:bf16"),
    }
    peaks: dict[str, int] = {}
    for way, prepare in ways.items():
        own = copy.deepcopy(net)
        call = prepare(own)
        call(ids).backward()
        own.zero_grad()
        peaks[way] = ft.peak_bytes(lambda c=call: c(ids).backward())
    autocasts = peaks.pop("autocast")
    # Gradients in fp32 stay; between the ways are the logits' gradient and copies of weights.
    assert all(peak <= autocasts for peak in peaks.values()), (autocasts, peaks)
    assert peaks["least"] < autocasts


class _Layer(nn.Module):
    """One of BERT, on [batch, length, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width) for _ in range(4)
        )
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (self.query, self.key, self.value)
        q, k, v = (of(x).unflatten(-1, (4, -1)).transpose(1, 2) for of in layers)
        read = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.first(x + self.output(read))
        return self.second(x + self.down(F.gelu(self.up(x))))


@pytest.mark.parametrize("way", ["raf", "matmult"])
def test_the_logits_gradient_takes_their_place_though_a_bias_sums_it_in_fp32(way: str) -> None:
    """Summed in the kernel that makes the low copy, the logits would live until its end."""
    net, x = nn.Linear(16, 1000), torch.randn(1024, 16)
    labels = torch.randint(0, 1000, (1024,))

    def loss() -> torch.Tensor:
        return F.cross_entropy(net(x), labels)

    ways: dict[str, Callable[[], Any]] = {
        "raf": lambda: ft.compile(loss, rule_set="raf"),
        "matmult": lambda: ft.compile(loss, "matmult:bf16"),
    }
    (peak,) = _peaks(net, {way: ways[way]}).values()
    logits = 2 * 1024 * 1000
    assert logits < peak < 1.5 * logits


@pytest.mark.long
@pytest.mark.parametrize("width", [64, 256])
def test_sums_in_fp32_take_no_more_memory_than_autocast(width: int) -> None:
    """A bias's gradient sums a view of values that were stored for it in fp32, too."""
    net = nn.Sequential(
        *(nn.Embedding(1000, width), nn.LayerNorm(width)),
        *(_Layer(width), nn.Linear(width, 1000)),
    )
    ids = torch.randint(0, 1000, (8, 128))

    def loss() -> torch.Tensor:
        return F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())

    def autocast() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss()

    ways: dict[str, Callable[[], Any]] = {
        "autocast": lambda: torch.compile(autocast),
        "raf": lambda: ft.compile(loss, rule_set="raf"),
        "raf, least": lambda: ft.compile(loss, rule_set="raf", memory="least"),
        "matmult": lambda: ft.compile(loss, "matmult:bf16"),
        "matmult, least": lambda: ft.compile(loss, "matmult:bf16", memory="least"),
    }
    peaks = _peaks(net, ways)
    autocasts = peaks.pop("autocast")
    assert all(peak <= autocasts for peak in peaks.values()), (autocasts, peaks)


@pytest.mark.long
def test_convolutions_with_norms_take_no_more_memory_than_autocast() -> None:
    """What the backward pass computes again is not stored in fp32 from kernel to kernel."""
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU()),
        *(nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU()),
        *(nn.Conv2d(32, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
    x, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))

    def loss() -> torch.Tensor:
        return F.cross_entropy(net(x), labels)

    def autocast() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss()

    ways: dict[str, Callable[[], Any]] = {
        "autocast": lambda: torch.compile(autocast),
        "least": lambda: ft.compile(loss, memory="least"),
        "all": lambda: ft.compile(loss, "all:bf16"),
    }
    peaks = _peaks(net, ways)
    autocasts = peaks.pop("autocast")
    assert all(peak < autocasts for peak in peaks.values()), (autocasts, peaks)


def _peaks(net: nn.Module, ways: Mapping[str, Callable[[], Any]]) -> dict[str, int]:
    """The peak of memory of a loss and its gradients, for each way to compile the loss."""
    peaks: dict[str, int] = {}
    with kernels_that_compute_nothing():
        for way, prepare in ways.items():
            torch._dynamo.reset()
            call = prepare()
            call().backward()
            net.zero_grad()
            peaks[way] = ft.peak_bytes(lambda c=call: c().backward())
            net.zero_grad()
    return peaks


@pytest.mark.usefixtures("op_by_op")
def test_a_checkpoint_saves_less() -> None:
    class Deep(nn.Module):
        def __init__(self, *, again: bool) -> None:
            super().__init__()
            self.again = again
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

        def body(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)
            return y.square().mean()

    saved: dict[bool, int] = {}
    x = torch.randn(4096, 64)
    for again in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = Deep(again=again)
        other, compiled = copy.deepcopy(net), ft.compile(net, "matmult:bf16")
        close(gradients(net, compiled, x), gradients(other, other, x))
        losses: list[torch.Tensor] = []  # holds the graph, so what is saved stays
        saved[again] = ft.peak_bytes(lambda c=compiled, h=losses: h.append(c(x)))
    assert saved[True] < 0.5 * saved[False]


@pytest.mark.usefixtures("op_by_op")
def test_views_that_share_memory_and_writes_in_place() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Parameter(torch.randn(64, 64) / 8)
            self.last = nn.Linear(64, 64)
            self.seen: torch.Tensor
            self.register_buffer("seen", torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up, down = self.both[:32], self.both[32:]
            y = torch.cat((x @ up.t(), x @ down.t()), 1)
            half = y[:, :32]
            half.mul_(2)
            y.add_(1)
            z = self.last(y)
            self.seen.add_(z.detach().mean(0))
            z[:, 0] = 0
            return z.square().mean()

    net, x = Shared(), torch.randn(256, 64)
    other, given = copy.deepcopy(net), x.clone()
    compiled = ft.compile(net, "matmult:bf16")
    close(gradients(net, compiled, x), gradients(other, other, x))
    assert torch.equal(x, given)
    assert net.seen.dtype is torch.float32
    torch.testing.assert_close(net.seen, other.seen, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.usefixtures("op_by_op")
def test_the_optimizer_may_be_in_the_step() -> None:
    net, x = Mlp(), torch.randn(128, 64)
    other = copy.deepcopy(net)

    def step_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    compiled = ft.compile(step_of(net), "matmult:bf16")
    plain = step_of(other)
    for _ in range(3):
        got, want = compiled(x), plain(x)
        assert float(got) == pytest.approx(float(want), rel=TOLERANCE)
    assert all(p.dtype is torch.float32 for p in net.parameters())
    assert any("bf16" in plan.counts for plan in compiled.finecast_plans)


@pytest.mark.usefixtures("op_by_op")
def test_the_backend_by_its_name_and_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(50, 32)
            self.head = nn.Linear(32, 50, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self.words(ids)), ids)

    net = Tied()
    other, ids = copy.deepcopy(net), torch.randint(0, 50, (256,))
    compiled = torch.compile(net, backend="finecast")
    close(gradients(net, compiled, ids), gradients(other, other, ids))


def plans_alive() -> int:
    gc.collect()
    return sum(isinstance(o, Plan) for o in gc.get_objects())


@pytest.mark.usefixtures("op_by_op")
def test_plans_of_the_backend_by_its_name_go_with_what_was_compiled() -> None:
    before = plans_alive()
    compiled = torch.compile(Mlp(), backend="finecast")
    compiled(torch.randn(128, 64)).backward()
    del compiled
    torch._dynamo.reset()
    assert plans_alive() == before


@pytest.mark.usefixtures("op_by_op")
def test_fp16_with_a_grad_scaler() -> None:
    net, x = Mlp(), torch.randn(128, 64)
    compiled = ft.compile(net, "matmult:fp16")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = float(compiled(x))
    for _ in range(5):
        scaler.scale(compiled(x)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert float(compiled(x)) < before
    assert "fp16" in compiled.finecast_plans[0].counts


class WithConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _unused = torch.tensor(100.0) * x  # numbered before the next, and then dropped
        return self.linear(x) * torch.log(torch.tensor(15.875))


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("policy", ["none", "all:bf16"])
def test_tensors_made_in_forward_keep_their_values(policy: str) -> None:
    net, x = WithConstants(), torch.randn(32, 64)
    other = copy.deepcopy(net)

    def loss(model: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: (model(x) * x).mean()

    compiled = ft.compile(net, policy)
    with torch.no_grad():
        close([compiled(x)], [other(x)])
    close(gradients(net, loss(compiled), x), gradients(other, loss(other), x))


@pytest.mark.usefixtures("op_by_op")
def test_overrides_reach_the_training_graph() -> None:
    net, x = Mlp(), torch.randn(128, 64)
    with rules.override({"matmul": lambda node: "fp32", "addmm": lambda node: "fp32"}):
        compiled = ft.compile(net, "matmult:bf16")
        compiled(x).backward()
    assert set(compiled.finecast_plans[0].counts) == {"fp32"}


def test_raf_s_bias_add_is_the_bias_of_linear_layers_and_no_residual() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
            self.norm = nn.LayerNorm(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return F.gelu(self.norm(x + self.second(x))).sum()

    def never(args: Any, ret_type: Any, amp_dtype: Any) -> list[str]:
        del ret_type, amp_dtype
        return ["float32"] * len(args)

    net, x = Block(), torch.randn(4, 8, 16)
    with rules.override({"raf.op.bias_add": never}):
        compiled = ft.compile(net, "all:bf16")
        close(gradients(net, compiled, x), gradients(net, net, x))
    formats = {d.node: d.format.label for d in compiled.finecast_plans[0].decisions}
    added = [n for n in formats if n.endswith("_add")]
    assert {n: formats[n] for n in added} == dict.fromkeys(added, "fp32")
    assert len(added) == 2
    assert formats["add"] == "bf16"  # the residual, and what follows it
    assert formats[next(n for n in formats if n.endswith("native_layer_norm"))] == "bf16"
    assert all(formats[n] == "bf16" for n in formats if n.endswith("_mm"))


def test_a_small_task_is_learnt_as_in_fp32() -> None:
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)

    class Cnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
                nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
                nn.Flatten(), nn.Linear(512, 10),
            )  # fmt: skip

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.body(x), y)

    def train(seed: int, *, low: bool) -> float:
        torch.manual_seed(seed)
        net = Cnn()
        call = ft.compile(net, "auto:bf16") if low else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        order = torch.randperm(len(x))[: 13 * 128].view(13, 128)
        last: list[float] = []
        for _ in range(2):
            for part in order:
                loss = call(x[part], y[part])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                last.append(float(loss))
        return sum(last[-5:]) / 5

    spread = [train(seed, low=False) for seed in range(3)]
    width = max(spread) - min(spread)
    assert abs(train(0, low=True) - spread[0]) <= max(width, 0.05 * spread[0])


def _nearest(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, scale_factor=2)


def _bilinear(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear")


def _reflected(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (1, 1, 1, 1), mode="reflect")


def _maxima(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool3d(x[:, :, None], (1, 2, 2))


@pytest.mark.parametrize("rule_set", ["finecast", "raf"])
@pytest.mark.parametrize(
    ("resample", "op"),
    [
        (_nearest, "scatter_elements"),
        (_bilinear, "scatter_elements"),
        (_reflected, "pad_backward"),
        (_maxima, "max_pool_backward"),
        (F.softplus, "gelu_backward"),
    ],
)
def test_gradients_of_resampled_pictures_are_planned(
    resample: Callable[[torch.Tensor], torch.Tensor], op: str, rule_set: str, fast_bf16: None
) -> None:
    """As in a U-Net: no op of the backward pass is unknown, and gradients are right."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    conv, x = nn.Conv2d(2, 2, 3, padding=1), torch.randn(1, 2, 4, 4)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return resample(conv(x)).square().mean()

    weight = conv.weight
    (wanted,) = torch.autograd.grad(loss(x), weight)
    backend = Backend("all:bf16", rule_set=rule_set, kernels=False)
    (gradient,) = torch.autograd.grad(torch.compile(loss, backend=backend)(x), weight)
    (plan,) = backend.plans
    assert op in {d.op for d in plan.decisions}
    assert plan.counts["bf16"] > 0
    assert 0 < float((gradient - wanted).norm()) < 0.05 * float(wanted.norm())
