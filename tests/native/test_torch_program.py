"""A PyTorch program behind the seam that a device's model asks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

import finecast  # noqa: E402
from finecast.data.options import DataOptions  # noqa: E402
from finecast.data.sources import workload_of  # noqa: E402
from finecast.data.workload import Workload  # noqa: E402
from finecast.devices.emulation import Setting, explicit_casts  # noqa: E402
from finecast.errors import UsageError  # noqa: E402
from finecast.native.device import DeviceModel  # noqa: E402
from finecast.native.emulated import OnDevice  # noqa: E402
from finecast.native.model import OpenedModel  # noqa: E402
from finecast.numbers.formats import Format  # noqa: E402
from finecast.numbers.rounding import round_to  # noqa: E402
from finecast.planning.plan import Plan  # noqa: E402
from finecast.planning.proposing import propose  # noqa: E402
from finecast.progress import silent  # noqa: E402
from finecast.rules.policy import Policy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

TRN1 = explicit_casts("trn1")


class Two(torch.nn.Module):
    """Two products with one, the second of them seen through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.v = torch.nn.Parameter(torch.eye(64))
        self.w = torch.nn.Parameter(torch.eye(64))

    def forward(self, x: Any, z: Any) -> Any:
        return (x @ self.v).flatten(0).view(-1, 64), z @ self.w


Opened = tuple[OpenedModel, Workload]


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    rng = np.random.default_rng(0)
    x, z = (rng.standard_normal((16, 64)).astype(np.float32) for _ in range(2))
    example = (torch.from_numpy(x), torch.from_numpy(z))
    torch.export.save(torch.export.export(Two().eval(), example), tmp_path / "m.pt2")
    model = finecast.load(tmp_path / "m.pt2")
    options = DataOptions(data={"x": x, "z": z}, metric="snr_db", batch=16)
    return model, workload_of(options, model.reference())


@pytest.fixture
def device(opened: Opened) -> DeviceModel:
    model, workload = opened
    return DeviceModel(
        program=model.program(TRN1), workload=workload, reference=model.reference()
    )


def examined(opened: Opened, policy: str) -> OnDevice:
    model, workload = opened
    found = model.subject(None, TRN1).examine(Policy.parse(policy), (), workload, silent)
    assert isinstance(found, OnDevice)
    return found


def test_outputs_have_the_names_of_the_file(device: DeviceModel) -> None:
    session = device.session(TRN1, Setting())
    assert list(session.run(device.feeds[0])) == list(device.reference.run(device.feeds[0]))
    assert [s.name for s in session.outputs] == [s.name for s in device.reference.outputs]


def test_a_plan_of_several_formats_has_each_where_it_says(opened: Opened) -> None:
    emulation = replace(TRN1, format=Format.BF16)
    search = examined(opened, "auto:bf16,fp16")
    device = search.device
    assert len(propose(search.planner, search.analysis())) > 1
    plan: Plan = search.planner.lowest()
    graph = search.planner.graph
    products = [n.name for n in graph.nodes if n.op == "linear"]
    formats = {
        n.id: f
        for n, f in zip(map(graph.find, products), (Format.BF16, Format.FP16), strict=True)
    }
    mixed = search.planner.plan(
        {**dict.fromkeys((n.id for n in graph.float_nodes), Format.FP32), **formats},
        "for the test",
    )
    feeds = device.feeds[0]
    first, second = device.program.plan_session(mixed, emulation).run(feeds).values()
    assert np.array_equal(first, round_to(feeds["x"].astype(np.float32), Format.BF16))
    assert np.array_equal(second, round_to(feeds["z"].astype(np.float32), Format.FP16))
    assert max(device.evaluate(device.program.plan_session(mixed, emulation))[1].values()) > 0
    assert device.plan_time_s(emulation, plan) < device.time_s(emulation, Setting())
    assert opened[0].build(mixed).casts > 0


def test_formats_that_pytorch_cannot_state_are_refused(opened: Opened) -> None:
    with pytest.raises(UsageError, match="do not compute in fp8_e4m3"):
        examined(opened, "auto:fp8_e4m3")
