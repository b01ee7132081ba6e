"""Products by constant matrices are linear layers, however a module writes them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast.torch as ft
from finecast.engines.torch.integers import compiled_frozen
from finecast.errors import ModelError
from finecast.frontends import torch as frontend
from finecast.measure.environment import environment
from finecast.numbers.formats import Format
from finecast.ops.patterns import adds_bias
from finecast.rules import override
from tests.torch.planned import plan_of
from tests.torch.test_int8 import converted, relative

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


class Turned(nn.Module):
    """Weights whose rows are inputs, as those of transformers' GPT-2, and one that is tied."""

    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 24) / 4)
        self.bias = nn.Parameter(torch.randn(24))
        self.tied = nn.Parameter(torch.randn(24, 16) / 4)
        self.register_buffer("last", torch.randn(16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.addmm(self.bias, x.flatten(0, 1), self.weight)
        x = (torch.tanh(rows) @ self.tied).view(x.shape) + self.tied.sum(0)
        return x @ self.last


class Others(nn.Module):
    """Products that are none: scaled, or by a matrix that is computed in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = torch.addmm(self.bias, x, self.weight, alpha=2)
        wide = torch.addmm(x, x, self.weight)
        return scaled @ torch.tanh(x) + wide


class Computed(nn.Module):
    """Weights that are computed of others: from fp16, by a weight norm, and a tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter((torch.randn(16, 16) / 4).half())
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.table = nn.Embedding(24, 16)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.normed(x @ self.low.float()) + self.table(ids)
        return x @ self.table.weight.t()


def memories(module: nn.Module) -> set[int]:
    """Where the tensors of a module are."""
    tensors = (*module.parameters(), *module.buffers())
    return {t.untyped_storage().data_ptr() for t in tensors}


@pytest.fixture
def net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Turned().eval(), torch.randn(4, 4, 16)


def test_products_by_constants_are_linear_layers(net: tuple[nn.Module, torch.Tensor]) -> None:
    module, x = net
    captured = frontend.capture(module, (x,))
    assert [n.op for n in captured.graph.nodes if n.op in ("linear", "addmm", "matmul")] == [
        "linear"
    ] * 3
    # A weight and its transpose are views of one memory, as they are in the module.
    with pytest.warns(UserWarning, match="nothing was converted"):
        made = ft.convert(module, (x,), "matmult:bf16", user_rules={"no": lambda _: "fp32"})
    assert len(memories(made)) == len(memories(module))
    with torch.no_grad():
        assert torch.equal(made(x), module(x))


def test_weights_that_are_computed_of_weights_are_constants() -> None:
    torch.manual_seed(0)
    module, args = Computed().eval(), (torch.randn(4, 16), torch.tensor([3, 0, 1, 3]))
    graph = frontend.capture(module, args).graph
    products = [n for n in graph.nodes if n.op == "linear"]
    assert [n.op for n in graph.nodes if n not in products] == ["gather", "add"]
    weights = [graph.read(n, 1) for n in products]
    assert [v is not None and v.constant is not None for v in weights] == [True] * 3
    with torch.no_grad():
        made = ft.convert(module, args, "matmult:bf16")
        exact, low = module(*args), made(*args)
    assert 0 < (low - exact).norm() < 0.02 * exact.norm()


def test_products_that_are_no_linear_layers_stay() -> None:
    torch.manual_seed(0)
    module, x = Others().eval(), torch.randn(16, 16)
    captured = frontend.capture(module, (x,))
    assert "linear" not in {n.op for n in captured.graph.nodes}
    made = ft.convert(module, (x,), "matmult:bf16")
    with torch.no_grad():
        assert 0 < relative(made(x), module(x)) < 0.02


class Biased(nn.Module):
    """Products with biases in all ways that PyTorch has."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Conv2d(3, 4, 3, padding="same")
        self.line = nn.Conv1d(4, 5, 3, stride=2)
        self.none = nn.Conv1d(5, 5, 1, bias=False)
        self.last = nn.Linear(5, 6)
        self.scaled = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lines = self.none(self.line(self.same(x).flatten(2)))
        x = self.last(lines.transpose(1, 2)).flatten(0, 1)
        x = torch.addmm(self.scaled, x, x.T @ x, beta=0.5)
        return torch.addmm(x[0] + 1, x, x.T @ x)


def test_biases_are_added_behind_products_where_a_rule_is_for_them() -> None:
    pytest.importorskip("finecast_raf")

    def never(args: Any, ret_type: Any, amp_dtype: Any) -> list[str]:
        del ret_type, amp_dtype
        return ["float32"] * len(args)

    net, x = Biased().eval(), torch.randn(2, 3, 8, 8)
    with override({"raf.op.bias_add": never}):
        captured = frontend.capture(net, (x,))
        low = ft.convert(net, (x,), "all:bf16")
    torch.testing.assert_close(captured.module(x), net(x))
    fp32 = {d.node for d in plan_of(low).decisions if d.format is Format.FP32}
    biases = {"same/conv2d_add", "line/conv1d_add", "last/linear_add"}
    assert fp32 >= biases
    # What the last product adds is computed: a vector, but no bias.
    assert {n.name for n in captured.graph.nodes if adds_bias(captured.graph, n)} == biases
    ops = [node.native for node in captured.graph.nodes]
    assert ops.count("aten::addmm") == 1  # the bias is scaled with it


def test_weights_whose_paths_differ_in_a_dot_stay_apart() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()
            self.part_weight = nn.Parameter(torch.randn(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.part.weight - x @ self.part_weight

    torch.manual_seed(0)
    module, x = Both().eval(), torch.randn(4, 16)
    made = ft.convert(module, (x,), "matmult:bf16")
    with torch.no_grad():
        assert 0 < relative(made(x), module(x)) < 0.02


@pytest.mark.parametrize("policy", ["all:int8", "all:int8,bf16"])
def test_such_products_read_codes(
    net: tuple[nn.Module, torch.Tensor], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = net
    made, _ = converted(monkeypatch, net, policy)
    assert made.finecast_plan.counts["int8"] == 3
    codes = [t for name, t in made.named_buffers() if name.endswith("_codes")]
    assert all(t.is_contiguous() for t in codes)
    with torch.no_grad():
        assert 0 < relative(made(x), module(x)) < 0.05


@pytest.mark.slow
@pytest.mark.skipif(
    not {"avx512_vnni", "avx_vnni"} & set(environment().flags), reason="needs VNNI"
)
def test_such_products_run_on_integers(
    net: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = converted(monkeypatch, net, "all:int8,bf16")
    run, left_out = compiled_frozen(made, (net[1],), {})
    assert not left_out
    with torch.no_grad():
        assert relative(run(net[1]), made(net[1])) < 0.03


def test_inputs_that_do_not_fit_are_one_error(
    net: tuple[nn.Module, torch.Tensor],
) -> None:
    """torch logs a traceback of the op that fails, and then raises its error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    told: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = told.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with pytest.raises(ModelError, match="cannot capture the module"):
            ft.convert(net[0], (torch.randn(4, 4, 15),), "all:bf16")
    finally:
        log.removeHandler(handler)
    assert not [record for record in told if record.levelno >= logging.ERROR]
    assert not log.disabled
