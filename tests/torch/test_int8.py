"""PyTorch's products on integers, in compiled modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import finecast.torch as ft
from finecast.errors import UsageError
from finecast.frontends import torch as frontend
from finecast.frontends.torch.codes import read_back, scales_of_products, stored_codes
from finecast.frontends.torch.converted import NOTES
from finecast.measure.environment import environment
from finecast.native.census import count_classes
from finecast.native.observing import observe
from finecast.native.torch import planning
from finecast.native.torch.model import of_module
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy
from finecast.rules.quantized import computed_in

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


class Net(nn.Module):
    """Convolutions with a residual sum, and products with an activation between."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 16, 3, padding=1)
        self.two = nn.Conv2d(16, 16, 3, padding=1)
        self.hidden = nn.Linear(16 * 8 * 8, 64)
        self.head = nn.Linear(64, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.one(x))
        x = x + torch.relu(self.two(x))
        return self.head(nn.functional.gelu(self.hidden(x.flatten(1))))


@pytest.fixture
def net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Net().eval(), torch.randn(8, 3, 8, 8)


def converted(
    monkeypatch: pytest.MonkeyPatch,
    net: tuple[nn.Module | torch.export.ExportedProgram, torch.Tensor],
    policy: str = "matmult:int8",
    *,
    left_out: frozenset[str] = frozenset(),
    error: float = 0.0,
    **options: Any,
) -> tuple[Any, list[str]]:
    """``convert``, where compiled modules run all products on integers but ``left_out``."""

    def compiled(module: torch.fx.GraphModule, *_: object) -> tuple[Any, frozenset[str]]:
        coded = scales_of_products(module)
        return lambda x: (1 + error) * module(x), left_out & coded.keys()

    monkeypatch.setattr(planning, "compiled_frozen", compiled)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        module, x = net
        result = ft.convert(module, (x,), policy, **options)
    return result, [str(w.message) for w in told]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def test_values_are_observed_with_their_signs(net: tuple[nn.Module, torch.Tensor]) -> None:
    module, x = net
    model = of_module(module, ((x,), {}))
    prepared = model.prepare(Policy())
    facts = observe(prepared, lambda: [model.examples])
    (seen,) = (facts[v.id] for v in prepared.graph.inputs)
    assert seen.lowest == float(x.min())
    assert seen.highest == float(x.max())


def test_products_read_codes_and_the_rest_stays(
    net: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = net
    for policy in ("matmult:int8", "all:int8"):
        made, told = converted(monkeypatch, net, policy)
        assert made.finecast_plan.counts == {"int8": 4, "fp32": 5}
        assert any(planning.FREEZING in text for text in told)
        with torch.no_grad():
            assert 0 < relative(made(x), module(x)) < 0.05
    stored = dict(made.named_buffers())
    codes = [t for name, t in stored.items() if name.endswith("_codes")]
    assert len(codes) == 4
    assert all(t.dtype is torch.int8 and int(t.abs().max()) == 127 for t in codes)
    # What the convolution's codes stand for, as the plan states them.
    (conv,) = (d for d in made.finecast_plan.decisions if d.node.endswith("conv2d"))
    encoding = conv.encodings.constants[1]
    back = encoding.decode(
        encoding.encode(module.get_parameter("one.weight").detach().numpy())
    )
    step = torch.tensor(encoding.scale).reshape(-1, 1, 1, 1)
    off = (torch.from_numpy(back) - module.get_parameter("one.weight")).abs()
    assert bool((off <= step / 2 * 1.0001).all())
    # Numbers are rounded right before each product, never before what moves them.
    (moved,) = (n for n in made.graph.nodes if str(n.target) == "aten.reshape.default")
    assert "quantize" not in str(moved.args[0].target)


def test_what_the_compiled_module_does_not_run_on_integers_is_dropped_and_said(
    net: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, told = converted(monkeypatch, net, left_out=frozenset({"linear"}))
    formats = {d.node: d.format for d in made.finecast_plan.decisions}
    assert [f for n, f in formats.items() if "linear" in n] == [Format.FP32, Format.INT8]
    floats = "planned in int8, PyTorch (compiled) runs it in floats all the same"
    assert f"'hidden/linear' keeps fp32: {floats}" in told
    (dropped,) = (d for d in made.finecast_plan.decisions if d.node == "hidden/linear")
    assert "PyTorch (compiled) runs it in floats all the same" in dropped.reasons[-1].text
    every = frozenset({"linear", "linear_1", "conv2d", "conv2d_1"})
    made, told = converted(monkeypatch, net, left_out=every)
    assert "int8" not in made.finecast_plan.counts
    assert any("'hidden/linear'" in text and floats in text for text in told)


def test_what_is_not_on_integers_has_the_next_format(
    net: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = net
    made, _ = converted(monkeypatch, net, "all:int8,bf16", left_out=frozenset({"linear"}))
    formats = {d.node: d.format for d in made.finecast_plan.decisions}
    assert formats["hidden/linear"] is Format.BF16
    assert formats["relu"] is Format.BF16
    assert formats["one/conv2d"] is Format.INT8
    # What a bf16 op gives is stored as codes all the same.
    codes = [n for n in made.graph.nodes if "quantize_per_tensor.default" in str(n.target)]
    assert sum("dequantize" not in str(n.target) for n in codes) == 3
    with torch.no_grad():
        assert 0 < relative(made(x), module(x)) < 0.05


def test_products_on_codes_that_bf16_ops_read_give_bf16(
    net: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's patterns: both operands and the bias are cast, and nothing behind."""
    module, x = net
    made, _ = converted(monkeypatch, net, "all:int8,bf16")
    first, _, hidden, head = (
        n
        for n in made.graph.nodes
        if str(n.target) in ("aten.conv2d.default", "aten.linear.default")
    )
    for product in (first, hidden):
        assert all(n.meta["val"].dtype is torch.bfloat16 for n in product.all_input_nodes)
        assert not any("_to_copy" in str(user.target) for user in product.users)
    assert head.meta["val"].dtype is torch.float32  # it is the output
    assert len(scales_of_products(made)) == 4
    with torch.no_grad():
        assert made(x).dtype is torch.float32
        assert 0 < relative(made(x), module(x)) < 0.05


@pytest.mark.parametrize("again", ["all:bf16", "all:int8,bf16"])
def test_products_on_codes_stay_so_when_converted_again(
    net: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    """Between what is read back from codes and its product a cast is no other op.

    The note of the conversion is taken away, as of a program that another tool quantized.
    """
    _, x = net
    made, _ = converted(monkeypatch, net, "all:int8,bf16")
    delattr(made, NOTES)
    program = torch.export.export(made, (x,))
    graph = frontend.capture(program, (), fold=False).graph
    products = [n for n in graph.nodes if n.op in ("conv", "linear")]
    assert {computed_in(graph, n) for n in products} == {"quantized"}
    same, _ = converted(monkeypatch, (program, x), again)
    with torch.no_grad():
        assert torch.equal(same(x), made(x))


def test_codes_are_counted_as_the_weights_that_they_stand_for(
    net: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = net
    made, _ = converted(monkeypatch, net, "all:int8,bf16")
    program = torch.export.export(made, (x,))
    graph = frontend.capture(program, (), fold=False).graph
    counted = sum(c.parameters for c in count_classes(graph, {}))
    assert counted == sum(p.numel() for p in module.parameters())


class Conv(nn.Module):
    """A convolution whose places are written as a user may."""

    def __init__(self, places: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.places = places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, self.weight, **self.places)


@pytest.mark.parametrize(
    ("places", "stated"),
    [
        ({"padding": "valid"}, {"padding": [0, 0]}),
        ({"padding": "valid", "stride": 2}, {"padding": [0, 0], "stride": [2, 2]}),
        ({"padding": (1,), "dilation": (2,)}, {"padding": [1, 1], "dilation": [2, 2]}),
    ],
)
def test_places_of_coded_convolutions_are_numbers_for_each_axis(
    places: dict[str, Any], stated: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN packs no weights for others, and the whole module would not compile."""
    torch.manual_seed(0)
    module, x = Conv(places).eval(), torch.randn(2, 3, 9, 9)
    made, _ = converted(monkeypatch, (module, x))
    (conv,) = made.graph.find_nodes(
        op="call_function", target=torch.ops.aten.conv2d.default, sort=True
    )
    assert {name: conv.kwargs[name] for name in stated} == stated
    with torch.no_grad():
        assert 0 < relative(made(x), module(x)) < 0.02


def test_places_are_numbers_where_convolutions_give_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Conv({"padding": "valid"}), nn.ReLU()).eval()
    made, _ = converted(monkeypatch, (module, torch.randn(2, 3, 9, 9)), "all:int8,bf16")
    (conv,) = (n for n in made.graph.nodes if n.name.startswith("conv2d"))
    assert conv.meta["val"].dtype is torch.bfloat16
    assert conv.kwargs["padding"] == [0, 0]


def test_what_does_not_compile_is_told(
    net: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Any:
        raise BackendCompilerFailed(fails, ValueError("no such layout\nin a graph"), None)

    monkeypatch.setattr(planning, "compiled_frozen", fails)
    with pytest.raises(UsageError, match="cannot be compiled: ValueError: no such l") as told:
        ft.convert(net[0], (net[1],), "matmult:int8")
    assert "C++" not in str(told.value)


def test_a_missing_compiler_is_told(
    net: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def fails(*_: object) -> Any:
        raise BackendCompilerFailed(fails, InvalidCxxCompiler(), None)

    monkeypatch.setattr(planning, "compiled_frozen", fails)
    with pytest.raises(UsageError, match=r"install a C\+\+ compiler"):
        ft.convert(net[0], (net[1],), "matmult:int8")


def test_each_step_is_told(
    net: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[str] = []
    converted(monkeypatch, net, progress=lambda stage, *_: stages.append(stage))
    assert stages == ["observe", "compile"]


def test_wrong_sums_keep_everything_in_fp32(
    net: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = net
    for error in (0.2, float("nan")):
        made, told = converted(monkeypatch, net, error=error)
        assert any("are wrong by" in text for text in told)
        with torch.no_grad():
            assert torch.equal(made(x), module(x))


def test_the_user_s_word_counts(
    net: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = {"mine": lambda view: "fp32" if view.op == "linear" else None}
    made, _ = converted(monkeypatch, net, user_rules=rules)
    low = [d.op for d in made.finecast_plan.decisions if d.format is Format.INT8]
    assert low == ["conv", "conv"]


@pytest.mark.parametrize("policy", ["auto:int8", "auto:int8,bf16"])
def test_what_is_measured_is_left_to_tune(
    policy: str, net: tuple[nn.Module, torch.Tensor]
) -> None:
    with pytest.raises(UsageError, match="use tune"):
        ft.convert(net[0], (net[1],), policy)


def test_adjusted_operands_are_refused(net: tuple[nn.Module, torch.Tensor]) -> None:
    with pytest.raises(UsageError, match="in models of ONNX and OpenVINO alone"):
        ft.convert(net[0], (net[1],), "matmult:int8+bias")


# What runs in a process that oneDNN holds to some instructions.
COMPILED = """
import json, sys, warnings, torch
from tests.torch import test_int8 as t
from finecast.engines.torch.integers import compiled_frozen
import finecast.torch as ft
from finecast.native.torch import planning
torch.manual_seed(0)
net, x = t.Net().eval(), torch.randn(8, 3, 8, 8)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    made = ft.convert(net, (x,), sys.argv[1])
_, found = compiled_frozen(made, (x,), {})
torch.compiler.reset()
exec(planning.FREEZING)
with torch.no_grad():
    off = t.relative(torch.compile(made)(x), made(x))
print(json.dumps({"counts": made.finecast_plan.counts, "left_out": [*found],
                  "off": off, "told": [str(w.message) for w in told]}))
"""


@pytest.mark.long
@pytest.mark.skipif(
    not {"avx512_vnni", "avx_vnni"} & set(environment().flags), reason="needs VNNI"
)
@pytest.mark.parametrize("policy", ["matmult:int8", "all:int8,bf16"])
def test_compiled_products_run_on_integers(policy: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, policy],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["counts"]["int8"] == 4, found
    assert found["left_out"] == []
    # Run as the warning says; compiled chains of bf16 ops round less than op by op.
    most = Format.INT8.unit_roundoff if policy == "matmult:int8" else 0.03
    assert found["off"] < most


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_a_constant_is_read_back_along_the_axis_of_its_channels(axis: int | None) -> None:
    """A matrix multiplied from the right has them along its columns."""
    tensor = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    scale = (0.5,) if axis is None else (0.5, 0.25, 0.125, 0.0625)
    grid = Format.INT8.grid(constant=True)
    encoding = Scaled(format=Format.INT8, grid=grid, scale=scale, axis=axis)
    graph = torch.fx.Graph()
    parts = stored_codes(tensor, encoding)
    graph.output(read_back(graph, {n: graph.placeholder(n) for n in parts}, encoding))
    got = torch.fx.GraphModule(nn.Module(), graph)(*parts.values())
    assert torch.equal(got, torch.from_numpy(encoding.round(tensor.numpy())))


def test_why_nothing_is_lowered_is_said() -> None:
    """It was silent: the caller had an fp32 module, and asked for int8."""
    stack = nn.Parameter(torch.randn(2, 4, 4))

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = stack

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.stack

    x = torch.randn(2, 3, 4)
    with pytest.warns(UserWarning, match=r"nothing was converted.* aten::matmul") as told:
        low = ft.convert(Experts().eval(), (x,), "all:int8")
    assert told[0].filename == __file__
    assert torch.equal(low(x), x @ stack)
