"""What conversion keeps of a module: ties, masks, state, ports of their own type."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast.torch as ft
from finecast.planning.points import find_points
from tests.graph.text import from_text
from tests.torch.planned import plan_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Tied(nn.Module):
    """One matrix by two names, read by three products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) @ self.table @ self.table


def test_tied_weights_have_one_low_copy() -> None:
    net, x = Tied().eval(), torch.randn(4, 8)
    low = ft.convert(net, (x,), "all:bf16")
    stored = {t.data_ptr() for t in low.state_dict().values() if t.dtype is torch.bfloat16}
    assert len(stored) == 2  # the matrix and the table
    torch.testing.assert_close(low(x), net(x), rtol=0.1, atol=0.1)


def test_weights_whose_paths_differ_in_a_dot_have_low_copies_of_their_own() -> None:
    class Alike(nn.Module):
        """Parameters at ``part.weight`` and ``part_weight``."""

        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(8, 8, bias=False)
            self.part_weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x) + x @ self.part_weight

    net, x = Alike().eval(), torch.randn(4, 8)
    low = ft.convert(net, (x,), "all:bf16")
    assert len(low.state_dict()) == 2
    torch.testing.assert_close(low(x), net(x), rtol=0.1, atol=0.1)


@pytest.mark.filterwarnings("ignore:the inputs cannot tell")  # the mask is all that counts
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_a_mask_stays_finite(kind: str) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Linear(8, 8)
            mask = torch.full((8,), torch.finfo(torch.float32).min)
            mask[:4] = torch.tensor([0.0, -0.3, -0.7, -1.1])  # no counts: those stay fp32
            if kind == "buffer":
                self.register_buffer("mask", mask)
            else:
                self.mask = nn.Parameter(mask)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight(x) * 0.0 + x * 0.0 * self.mask + self.mask

    net, x = Masked().eval(), torch.randn(4, 8)
    low = ft.convert(net, (x,), "all:bf16")
    assert set(plan_of(low).counts) == {"bf16"}
    with torch.no_grad():
        got = low(x)
    assert torch.isfinite(got).all()
    assert (got[:, 4:] < -3e38).all()


@pytest.mark.parametrize("first", ["read", "written"])
def test_a_buffer_that_is_written_is_no_constant(first: str) -> None:
    class Running(nn.Module):
        kept: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.ones(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if first == "read":
                y = x @ self.kept
                self.kept.mul_(2.0)
                return y
            self.kept.mul_(2.0)
            return x @ self.kept

    net, x = Running().eval(), torch.ones(2, 8)
    low = ft.convert(net, (x,), "all:bf16")
    start = float(low(x)[0, 0])
    assert start == (8.0 if first == "read" else 16.0)
    assert float(low(x)[0, 0]) == 2 * start
    assert float(low(x)[0, 0]) == 4 * start


def test_a_port_of_its_own_type_is_not_rounded_by_its_reader() -> None:
    graph = from_text(
        "input %0 x fp32[4]\n"
        "node first relu aten::relu fp32 (%0) -> (%1 a fp32[4])\n"
        "node own mul aten::mul fp32 (~%1, %0) -> (%2 y fp32[4])\noutput %2\n"
    )
    points = find_points(graph, frozenset({0, 1}))
    (fixed,) = (p for p in points if p.reader == 1 and p.port == 0)
    (follows,) = (p for p in points if p.reader == 1 and p.port == 1)
    assert fixed.path == (0,)  # rounded where it is made, not where it is read
    assert 1 in follows.path


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("tied", [False, True])
def test_a_parameter_reached_twice_adds_its_gradients(tied: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32, bias=False)
            self.outer = self.inner
            if tied:
                self.outer = nn.Linear(32, 32, bias=False)
                self.outer.weight = self.inner.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(torch.tanh(self.inner(x))).sum()

    net, x = Twice(), torch.randn(8, 32)
    net(x).backward()
    assert net.inner.weight.grad is not None
    want = net.inner.weight.grad.clone()
    net.zero_grad()
    compiled = ft.compile(net, "matmult:bf16", accumulation=True)
    for times in (1, 2, 3):
        compiled(x).backward()
        got = net.inner.weight.grad
        assert got is not None
        assert got.dtype is torch.float32
        assert float((got - times * want).norm() / want.norm()) < 0.02 * times


def test_of_one_parameter_given_twice_one_gradient_is_added_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autograd adds what a backward pass returns: the kept gradient must be in it once."""
    inductor = pytest.importorskip("finecast_training.inductor")

    monkeypatch.setattr(inductor, "_will_engine_execute_node", lambda _node: True)
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), 100.0)
    own = (1.0, 10.0)

    class Compiled:
        """A backward graph of two inputs, each followed by memory and a flag."""

        @staticmethod
        def current_callable(inputs: list[torch.Tensor]) -> list[None]:
            pairs = [(inputs[2], inputs[3]), (inputs[4], inputs[5])]
            for gradient, (memory, there) in zip(own, pairs, strict=True):
                memory.copy_(torch.where(there, memory + gradient, gradient))
            return [None, None]

    added = [inductor.AddedGradient(source=k, result=k) for k in range(2)]
    found = inductor.feed(Compiled(), added).current_callable([parameter, parameter])
    grads: list[torch.Tensor | None] = [*found, parameter.grad]
    total = torch.stack([g for g in grads if g is not None]).sum(0)
    assert torch.equal(total, torch.full((3,), 111.0))
