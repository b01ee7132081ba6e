"""Plans beside torch.autocast: their errors, what they save for the backward pass."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import finecast.torch as ft
from finecast.engines.torch import TorchEngine
from finecast.errors import UsageError
from finecast.frontends import torch as frontend
from finecast.native.planning import Judging, make_planner
from finecast.native.torch.planning import autocast_formats, choose
from finecast.numbers.formats import Format
from finecast.planning.problem import Choice
from finecast.rules.policy import Policy
from tests.torch.planned import plan_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)

# The bar of errors: both round to the same format, at places that differ a little.
BAR = 1.1


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


class PostNorm(nn.Module):
    """A layer as BERT has it: the norm of each residual is what the next one adds to."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x @ x.transpose(-1, -2), -1) @ self.mix(x)
        x = self.norms[0](x + y)
        return self.norms[1](x + self.down(F.gelu(self.up(x))))


class Words(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 64)
        self.layers = nn.Sequential(*(PostNorm() for _ in range(layers)))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.words(ids)).float().square().mean()


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(3 if k == 0 else 8, 8, 3, padding=1, bias=False) for k in range(3)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = F.relu(norm(conv(x)))
            x = y if x.shape != y.shape else x + y
        return x.float().square().mean()


class Residuals(nn.Module):
    """Blocks as diffusers has them: norms of groups, sums that are divided by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, 8) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = (x + conv(F.silu(norm(x)))) / 1.5
        return x.float().square().mean()


CASES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "words": lambda: (Words(), torch.randint(0, 100, (4, 32))),
    "pictures": lambda: (Pictures(), torch.randn(4, 3, 16, 16)),
    "residuals": lambda: (Residuals(), torch.randn(4, 3, 16, 16)),
}


def under_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return call(*args)

    return run


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("policy", ["auto:bf16", "like-autocast:bf16"])
def test_the_error_of_a_post_norm_net_is_not_above_autocast_s(policy: str) -> None:
    net = Words(2).layers.eval()
    x = torch.randn(4, 32, 64)
    low = ft.convert(net, (x,), policy)
    with torch.no_grad():
        want = net(x)
        assert error(low(x), want) <= BAR * error(under_autocast(net)(x), want)
    formats = {(d.op, d.format) for d in plan_of(low).decisions}
    # Every product is low, and what rounds no more than those do.
    assert ("linear", Format.BF16) in formats
    assert ("linear", Format.FP32) not in formats
    assert ("gelu", Format.BF16) in formats
    # The plan tells what each choice does to the error.
    assert any(
        "error if bf16" in r.evidence for d in plan_of(low).decisions for r in d.reasons
    )


def test_autocast_s_plan_follows_the_types_that_ops_read() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.a(x))
            return torch.exp(self.norm(x + y).t() @ y)

    captured = frontend.capture(Net().eval(), (torch.randn(4, 8),))
    policy = Policy.parse("auto:bf16")
    prepared = frontend.TorchPrepared(graph=captured.graph, source=captured)
    planner = make_planner(prepared, policy, TorchEngine(), Judging(measured=True))
    found = autocast_formats(captured.graph, planner.permissions, policy.formats)
    formats = {captured.graph.nodes[n].op: f for n, f in found.items()}
    low, high = Format.BF16, Format.FP32
    assert formats["linear"] is formats["tanh"] is formats["matmul"] is formats["exp"] is low
    assert formats["add"] is formats["layer_norm"] is high
    # It is read by a product alone, and rounded there: moved before or after, the same.
    assert formats["transpose"] is low


def test_the_fastest_choice_within_the_budget_is_taken() -> None:
    def choice(index: int, time_s: float, squared: float) -> Choice:
        return Choice(index=index, formats=(), time_s=time_s, error=squared)

    found = [
        choice(0, 9.0, 0.0),
        choice(1, 3.01, 1.0),
        choice(2, 3.0, 2.0),
        choice(3, 1.0, 8.0),
    ]
    assert choose(found).index == 3
    assert choose(found, 8.0).index == 3
    assert choose(found, 7.9).index == 1  # as fast as the fastest within, and more accurate
    assert choose(found, math.nextafter(0, -1)).index == 0


@pytest.fixture
def forward_graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Forward graphs of what is compiled, run op by op: no kernel is built."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._inductor import compile_fx

        from finecast_training import inductor

    found: list[torch.fx.GraphModule] = []

    def inner(module: Any, inputs: Sequence[Any], **options: Any) -> Any:
        if not options.get("is_backward"):
            found.append(module)
        return inductor.OpByOp(module)

    def autocast(module: Any, inputs: Sequence[Any]) -> Any:
        return compile_fx.compile_fx(module, inputs, inner_compile=inner)

    monkeypatch.setattr(inductor, "compile_inner", inner)
    monkeypatch.setitem(BACKENDS, "autocast", autocast)
    return found


BACKENDS: dict[str, Callable[..., Any]] = {}


def saved_bytes(forward: torch.fx.GraphModule) -> int:
    """Bytes of what a forward graph makes and gives: its result and what it saves."""
    (end,) = forward.graph.find_nodes(op="output")
    values = {n: n.meta["val"] for n in end.args[0] if isinstance(n, torch.fx.Node)}
    return sum(
        v.numel() * v.element_size()
        for n, v in values.items()
        if isinstance(v, torch.Tensor) and n.op != "placeholder"
    )


def gradients(net: nn.Module, call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    net.zero_grad()
    call(x).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", CASES)
def test_training_saves_no_more_than_autocast_and_is_as_accurate(
    name: str, forward_graphs: list[torch.fx.GraphModule]
) -> None:
    net, x = CASES[name]()
    nets = {way: copy.deepcopy(net) for way in ("autocast", "finecast", "least")}
    compiled = ft.compile(nets["finecast"])
    calls = {
        "autocast": torch.compile(
            under_autocast(nets["autocast"]), backend=BACKENDS["autocast"]
        ),
        "finecast": compiled,
        "least": ft.compile(nets["least"], memory="least"),
    }
    want = gradients(net, net, x)
    off = {way: error(gradients(nets[way], call, x), want) for way, call in calls.items()}
    saved = dict(zip(calls, map(saved_bytes, forward_graphs), strict=True))
    assert saved["finecast"] <= saved["autocast"]
    assert saved["least"] < saved["finecast"]
    assert off["finecast"] <= BAR * off["autocast"]
    assert off["least"] <= BAR * off["autocast"]
    plan = compiled.finecast_plans[0]
    assert plan.counts["bf16"] > plan.counts["fp32"] / 2


def test_the_gradient_of_a_bias_is_summed_in_the_type_that_autocast_sums_it_in(
    forward_graphs: list[torch.fx.GraphModule],
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(16, 16)
            self.product = nn.Linear(16, 8, bias=False)
            self.behind = nn.Parameter(torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.log_softmax(self.inside(x), -1)
            return torch.log_softmax(self.product(y) + self.behind, -1).square().sum()

    net, x = Net(), torch.randn(4, 16)
    compiled = ft.compile(net)
    compiled(x).backward()
    (plan,) = compiled.finecast_plans
    sums = {d.node: d.format for d in plan.decisions if d.op == "reduce_sum"}
    forward, behind, inside = sums.values()  # in the order of the graph: the last layer first
    assert inside is Format.BF16  # the linear layer's kernel adds the bias
    assert behind is Format.FP32  # the addition is another op, which autocast has in fp32
    assert forward is Format.FP32


@pytest.mark.parametrize("options", [{"memory": "least"}, {"accumulation": True}], ids=str)
def test_low_copies_of_parameters_are_cast_again_rather_than_saved(
    options: dict[str, Any], forward_graphs: list[torch.fx.GraphModule]
) -> None:
    net, x = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3))), torch.randn(8, 48)
    compiled = ft.compile(net, "matmult:bf16", **options)
    compiled(x).sum().backward()
    assert compiled.finecast_plans[0].counts["bf16"] >= 3
    (forward,) = forward_graphs
    (end,) = forward.graph.find_nodes(op="output")
    values = [n.meta["val"] for n in end.args[0] if isinstance(n, torch.fx.Node)]
    assert not [v for v in values if v.dtype is torch.bfloat16 and v.shape == (48, 48)]


def test_a_choice_of_memory_that_there_is_not() -> None:
    with pytest.raises(UsageError, match="least"):
        ft.compile(nn.Linear(2, 2), memory="lest")


def test_where_autocast_rounds_nothing_all_lowers_all() -> None:
    low = ft.convert(nn.Sequential(nn.Tanh(), nn.Sigmoid()), (torch.randn(8, 8),), "all:bf16")
    assert set(plan_of(low).counts) == {"bf16"}


def test_gradients_of_an_fp32_value_are_added_up_in_fp32(
    forward_graphs: list[torch.fx.GraphModule],
) -> None:
    """Its readers are low, each by a cast of its own, as autograd has it under autocast."""
    net, x = Attending(), torch.randn(4, 8, 64)
    compiled = ft.compile(net)
    compiled(x).sum().backward()
    assert len(forward_graphs) == 1
    decisions = compiled.finecast_plans[0].decisions
    sums = [d.format for d in decisions if d.op == "add"]
    assert len(sums) == 2
    assert set(sums) == {Format.FP32}
    assert compiled.finecast_plans[0].counts["bf16"] > 10


class Attending(nn.Module):
    """A norm whose result three products read."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scale * (x * x.square().mean(-1, keepdim=True).rsqrt())
        return torch.tanh(self.q(y) * self.k(y)) @ self.v(y).transpose(-1, -2)


def test_experts_are_chosen_by_probabilities_in_fp32_when_training_too(
    forward_graphs: list[torch.fx.GraphModule],
) -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.inner = nn.Linear(64, 8), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, experts = torch.softmax(self.router(x), -1).topk(2)
            return (self.inner(x) * weights.sum(-1, keepdim=True)).sum() + experts.sum()

    compiled = ft.compile(Routed(), "all:bf16")
    compiled(torch.randn(16, 64)).backward()
    assert len(forward_graphs) == 1
    formats = {d.op: d.format for d in compiled.finecast_plans[0].decisions}
    assert formats["softmax"] is formats["top_k"] is Format.FP32
    assert formats["softmax_backward"] is Format.BF16
