"""DDP and FSDP2 with two gloo processes: gradients as those of one process in fp32."""

from __future__ import annotations

import copy
import gc
import os
import socket
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F  # noqa: N812

import finecast.torch as ft
from plugins.training.tests.uncompiled import run_op_by_op

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(
        not distributed.is_available() or not distributed.is_gloo_available(),
        reason="torch.distributed without gloo",
    ),
]
WORLD = 2
Case = tuple[str, int]
# How the net is spread, and microbatches between two steps of the optimizer.
CASES: tuple[Case, ...] = (("ddp", 1), ("ddp", 4), ("fsdp2", 1), ("fsdp2", 4))
# Weights, activations, gradients and their sum over processes: see test_training.
TOLERANCE = 16 * 2.0**-8


class Net(nn.Module):
    """Two layers and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 128)
        self.second = nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.second(torch.tanh(self.first(x))), x)


def _plain() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(WORLD, 64, 32)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient, from all processes if each has a shard."""
    grad: Any = parameter.grad
    assert grad is not None
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def _accumulate(net: nn.Module, call: Any, parts: Sequence[torch.Tensor]) -> None:
    """One step's gradients, from microbatches; processes exchange them at the last one."""
    net.zero_grad()
    for number, part in enumerate(parts, start=1):
        last = number == len(parts)
        ddp = isinstance(net, nn.parallel.DistributedDataParallel)
        if hasattr(net, "set_requires_gradient_sync"):
            cast("Any", net).set_requires_gradient_sync(last)
        with net.no_sync() if ddp and not last else nullcontext():
            (call(part) / len(parts)).backward()


def _train(rank: int, kind: str, microbatches: int) -> dict[str, Any]:
    net, x = _plain()
    backend = ft.Backend("matmult:bf16", accumulation=microbatches > 1)
    if kind == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD,))
        fully_shard(net, mesh=mesh)
    call = torch.compile(net, backend=backend)
    grads: list[torch.Tensor] = []
    for _ in range(2):  # the second step, with new weights, is what is compared
        _accumulate(net, call, x[rank].chunk(microbatches))
        grads = [_whole(p).clone() for p in net.parameters()]
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    return {"grads": grads, "counts": [plan.counts for plan in backend.plans]}


def _work(rank: int, ports: Sequence[int], out: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        run_op_by_op(patched)
        for case, port in zip(CASES, ports, strict=True):
            _work_on(rank, port, *case, f"{out}/{case}-{rank}.pt")


def _work_on(rank: int, port: int, kind: str, microbatches: int, out: str) -> None:
    """One case, in a group of processes of its own."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        torch.save(_train(rank, kind, microbatches), out)
        # The module goes before its group: a DDP module that is the last to hold it joins the
        # group's threads with the GIL held, which they may wait for (seen with torch 2.13).
        torch.compiler.reset()
        gc.collect()
    finally:
        distributed.destroy_process_group()


def _free_ports() -> tuple[int, ...]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in CASES]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return tuple(int(one.getsockname()[1]) for one in sockets)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each process found, by case: two processes go through all of them."""
    out = tmp_path_factory.mktemp("results")
    given = (_free_ports(), str(out))
    start_processes(_work, args=given, nprocs=WORLD, start_method="spawn")
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_processes_have_the_gradients_of_one(case: Case, results: Path) -> None:
    net, x = _plain()
    want: list[torch.Tensor] = []
    for _ in range(2):
        net.zero_grad()
        loss: Any = sum(net(part) for part in x)
        (loss / WORLD).backward()
        want = [copy.deepcopy(p.grad) for p in net.parameters() if p.grad is not None]
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    found = [
        torch.load(results / f"{case}-{rank}.pt", weights_only=True) for rank in range(WORLD)
    ]
    for rank in found:
        assert sum(counts.get("bf16", 0) for counts in rank["counts"]) >= 4
        assert len(rank["grads"]) == len(want)
        for got, exact in zip(rank["grads"], want, strict=True):
            assert got.dtype is torch.float32
            assert float((got - exact).norm() / exact.norm()) < TOLERANCE
    for one, other in zip(found[0]["grads"], found[1]["grads"], strict=True):
        assert torch.equal(one, other)
