from __future__ import annotations

import functools

import pytest

pytest.importorskip("torch")

import torch

import finecast.torch as ft

MIB = 2**20
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_peak_is_that_of_the_tensors_alive_together() -> None:
    a = torch.zeros(MIB // 4)

    def three_in_turn() -> torch.Tensor:
        b = a + 1
        c = b * 2
        del b
        d = c + c
        return d.sum()

    # Two of one MiB at a time; scalars and alignment are bytes.
    assert 2 * MIB <= ft.peak_bytes(three_in_turn) < 2.01 * MIB


def test_profile_counts_times_and_resident_memory() -> None:
    net, x = torch.nn.Linear(512, 512, bias=False), torch.zeros(8, 512)
    found = ft.profile(net, (x,), warmup=1, repeats=5)
    assert found.latency.runs == 5
    assert found.ms > 0
    assert found.resident_bytes == MIB + 8 * 512 * 4
    assert found.mb >= 1


def test_a_step_holds_what_it_closes_over() -> None:
    net = torch.nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    x = torch.zeros(8, 512)

    def step(batch: torch.Tensor) -> None:
        net(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def weights_alone(batch: torch.Tensor) -> torch.Tensor:
        return (lambda given: given @ net.weight)(batch)

    class Trainer:
        def __init__(self) -> None:
            self.model = net

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.model(batch)

    inputs = x.nbytes
    assert ft.resident_bytes(weights_alone, (x,)) == MIB + inputs
    assert ft.resident_bytes(Trainer().forward, (x,)) == MIB + inputs
    assert ft.resident_bytes(functools.partial(step, x), ()) == MIB + inputs
    assert ft.resident_bytes(torch.compile(step, backend="eager"), (x,)) == MIB + inputs
    found = ft.profile(step, (x,), warmup=1, repeats=1)
    assert found.resident_bytes == 2 * MIB + inputs  # with the optimizer's momentum
    assert found.mb >= 2


def test_activations_are_what_a_step_frees_again() -> None:
    weight = torch.ones(256, 256, requires_grad=True)
    x = torch.ones(2 * MIB // 4 // 256, 256)

    def step() -> None:
        (x @ weight).sigmoid().sum().backward()

    # Product, sigmoid (saved) and its gradient are of 2 MiB, at most three at once; the
    # gradient of the weight, 1/4 MiB, stays.
    assert 4 * MIB <= ft.activation_bytes(step) <= 6.01 * MIB
    weight.grad = None
    assert ft.peak_bytes(step) >= 4 * MIB
    assert ft.profile(step, warmup=0, repeats=1).activation_bytes <= 6.01 * MIB


def test_what_a_call_keeps_is_no_activation() -> None:
    kept: list[torch.Tensor] = []
    assert ft.activation_bytes(lambda: kept.append(torch.ones(MIB // 4))) < 0.01 * MIB
    assert ft.peak_bytes(lambda: kept.append(torch.ones(MIB // 4))) >= MIB
