"""int8_dynamic_row: linear layers that round what they read, by a scale for each row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import finecast.torch as ft
from finecast import api
from finecast.errors import UsageError
from finecast.frontends.native_model import with_roundings
from finecast.frontends.torch import codes, planned_edits
from finecast.frontends.torch.codes import scales_of_products
from finecast.frontends.torch.native import TorchNative
from finecast.frontends.torch.runnable import Isolated
from finecast.measure.environment import environment
from finecast.native.torch.model import of_module
from finecast.native.torch.planning import check_device
from finecast.numbers.encodings import Dynamic
from finecast.numbers.formats import WHOLE_ROW, Format
from finecast.rules.policy import Policy
from tests.torch.quantized_layers import Array, Net, expected, layers, product, relative
from tests.torch.test_int8 import converted

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

ROW = Format.INT8_DYNAMIC_ROW
POLICY = f"matmult:{ROW.label}"


@pytest.fixture
def net() -> Net:
    return layers()


def rounded(x: Array) -> Array:
    """What a kernel makes of a value, written without finecast's code."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    return np.asarray(np.rint(x / np.where(scale == 0, 1, scale)) * scale, np.float32)


def test_products_round_rows_as_the_format_says(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = net
    made, told = converted(monkeypatch, net, POLICY)
    assert made.finecast_plan.counts[ROW.label] == 5
    assert len(scales_of_products(made)) == 5
    assert any("freezing" in text for text in told)
    with torch.no_grad():
        got = made(x).numpy()
    np.testing.assert_allclose(
        got, expected(module, x, rounded, odd=rounded), rtol=1e-3, atol=1e-3
    )
    # Both that read x share its codes.
    assert sum("quantize_per_tensor" in str(n.target) for n in made.graph.nodes) == 2 * 4
    stored = [t for n, t in made.named_buffers() if n.endswith("_codes")]
    assert [t.dtype for t in stored] == [torch.int8] * 5


def test_emulated_numbers_are_those_of_the_module(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = net
    made, _ = converted(monkeypatch, net, POLICY)
    captured = of_module(module, ((x,), {})).file.captured(POLICY)
    plan = made.finecast_plan
    operands = [how for e in plan.encodings.values() for how in e.operands.values()]
    assert operands == [Dynamic(format=ROW, group=WHOLE_ROW)] * 5
    copy = with_roundings(TorchNative.of(captured), planned_edits(captured, plan))
    with torch.no_grad():
        (emulated,) = tree_leaves(Isolated(copy.module).leaves([x]))
        assert relative(emulated, made(x)) < 1e-6


def test_it_mixes_with_bf16_op_by_op(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = net
    made, _ = converted(
        monkeypatch, net, f"all:{ROW.label},bf16", left_out=frozenset({"linear"})
    )
    counts = made.finecast_plan.counts
    assert counts[ROW.label] == 4
    assert counts["bf16"] >= 2
    with torch.no_grad():
        assert 0 < relative(made(x), module(x)) < 0.05


class Wide(nn.Module):
    """Sizes that are multiples of 8, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 16), nn.Linear(16, 8, bias=False)
        self.odd = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(self.second(self.first(x).relu()))


@pytest.mark.parametrize("rows", [2, 40])
def test_graphs_for_gpus_state_products_of_integers(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same graph on a CPU, which has the op, too: it equals numpy's."""
    monkeypatch.setattr(codes, "states_product", lambda *_, **__: True)
    torch.manual_seed(0)
    module, x = Wide().eval(), torch.randn(rows, 24)
    made, _ = converted(monkeypatch, (module, x), POLICY)
    assert made.finecast_plan.counts[ROW.label] == 3
    products = [n for n in made.graph.nodes if "int_mm" in str(n.target)]
    assert len(products) == 2
    # Kernels take no fewer than 17 rows.
    assert all(n.args[0].meta["val"].shape[0] > 16 for n in products)
    with torch.no_grad():
        got = made(x).numpy()
    first = (
        product(x.numpy(), module.first.weight, rounded) + module.first.bias.detach().numpy()
    )
    second = product(np.maximum(first, 0), module.second.weight, rounded)
    want = product(second, module.odd.weight, rounded) + module.odd.bias.detach().numpy()
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("policy", "says"), [(POLICY, ""), ("matmult:int8", "use int8_dynamic_row, bf16")]
)
def test_gpus_have_products_whose_scales_are_found_at_run_time(policy: str, says: str) -> None:
    if not says:
        check_device(Policy.parse(policy), "cuda")
        return
    with pytest.raises(UsageError, match="int8 on cuda") as told:
        check_device(Policy.parse(policy), "cuda")
    assert says in str(told.value.fix)


class Values(nn.Module):
    """A product of two values, and one by weights that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ x.transpose(-1, -2)


def test_only_products_by_constant_weights_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    table = nn.Sequential(nn.Embedding(30, 8), nn.Conv1d(4, 4, 3), nn.Linear(6, 5)).eval()
    made, _ = converted(monkeypatch, (table, torch.randint(30, (2, 4))), POLICY)
    low = [d.op for d in made.finecast_plan.decisions if d.format is ROW]
    assert low == ["linear"]
    made, _ = converted(monkeypatch, (Values().eval(), torch.randn(3, 8)), f"all:{ROW.label}")
    reasons = {d.op: d.reasons[-1].text for d in made.finecast_plan.decisions}
    assert ROW.label not in made.finecast_plan.counts
    assert "not constant" in reasons["matmul"]


def test_groups_are_refused_and_rows_named(net: Net) -> None:
    module, x = net
    with pytest.raises(UsageError, match="int8_dynamic is planned for") as told:
        ft.convert(module, (x,), "matmult:int8_dynamic")
    assert ROW.label in str(told.value.fix)


def test_an_onnx_model_is_not_sent_to_an_engine_that_does_not_read_it() -> None:
    with pytest.raises(UsageError, match="made for PyTorch alone") as told:
        api.convert("examples/digits/digits.onnx", policy=f"all:{ROW.label}")
    assert "PyTorch's module" in str(told.value.fix)
    assert "--engine" not in str(told.value.fix)


# In a process that has only PyTorch: no part of finecast is loaded.
LOADED = """
import json, sys, torch
import torch.ao.quantization.fx._decomposed
program = torch.export.load(sys.argv[1])
args, kwargs = program.example_inputs
torch._inductor.config.freezing = True
with torch.no_grad():
    got = torch.compile(program.module(), dynamic=False)(*args, **kwargs)
    own = program.module()(*args, **kwargs)
assert "finecast" not in sys.modules
print(json.dumps(float((got - own).norm() / own.norm())))
"""


@pytest.mark.long
@pytest.mark.skipif(
    not {"avx512_vnni", "avx_vnni"} & set(environment().flags), reason="needs VNNI"
)
def test_a_written_program_is_compiled_in_a_process_of_its_own(
    tmp_path: Path,
) -> None:
    """Both products are seen to run on integers, by the real compiler."""
    module, x = (
        nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8)).eval(),
        torch.randn(2, 4, 32),
    )
    program, out = tmp_path / "net.pt2", tmp_path / "low.pt2"
    torch.export.save(torch.export.export(module, (x,)), program)
    done = api.convert(program, out, POLICY)
    assert done.plan.counts[ROW.label] == 2
    ran = subprocess.run(
        [sys.executable, "-c", LOADED, str(out)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) < 1e-5
