"""Two processes tune one training step: both follow one plan, or an error says why not."""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import start_processes

import finecast.torch as ft
from finecast.errors import UsageError
from finecast_training.step_plan import StepPlan, Way
from plugins.training.tests.test_tune_step import loss, stated

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not distributed.is_available() or not distributed.is_gloo_available(),
        reason="torch.distributed without gloo",
    ),
]
WORLD = 2


def _work(rank: int, port: int, out: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=WORLD)

    def seconds(plan: StepPlan) -> float:
        """Each process finds another way the fastest."""
        return 1.0 if plan.way is (Way.PLANNED if rank == 0 else Way.AUTOCAST) else 2.0

    try:
        with pytest.MonkeyPatch.context() as patched:
            stated(patched, seconds)
            for job, width in (("one", 4), ("two", 4 + rank)):
                torch.manual_seed(0)
                net = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 4))
                some = [(torch.randn(8, 16), torch.randint(0, 4, (8,)))]
                try:
                    result = ft.tune_step(
                        net, loss, some, max_memory=10**9, moments=1, between=0
                    )
                    own = str(result.plan.digest)
                except UsageError as error:
                    own = error.what
                Path(f"{out}/{job}-{rank}").write_text(own, encoding="utf-8")
                distributed.barrier()
    finally:
        distributed.destroy_process_group()


def test_processes_follow_one_plan_or_say_why_not(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    start_processes(_work, args=(port, str(tmp_path)), nprocs=WORLD, start_method="spawn")
    said = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert said["one-0"] == said["one-1"]
    assert said["one-0"].startswith("planned:")
    assert said["two-0"] == said["two-1"] == "process 1 trains another graph than process 0"
