"""Converted modules are copied, pickled and moved as any module is."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.export import Dim
from torch.utils._pytree import tree_leaves

import finecast
import finecast.torch as ft
from finecast.errors import ModelError, UsageError
from finecast.frontends.torch import ConvertedModule
from finecast.frontends.torch.converted import StoredOp, provenance_in
from finecast.native.torch import planning

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Pair(NamedTuple):
    """A result with names."""

    product: torch.Tensor
    rest: dict[str, torch.Tensor]


class Net(nn.Module):
    """A product, positions that the graph makes, and a count that it writes to."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = nn.Embedding(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Pair:
        self.calls.add_(1.0)
        places = torch.arange(x.shape[0], device=x.device)
        y = self.linear(x) * scale + self.table(places)
        y = y.contiguous(memory_format=torch.contiguous_format)
        y = torch.empty_like(y, layout=torch.strided).copy_(y)
        return Pair(y * self.calls, {"x": x})


def repickled(module: ConvertedModule) -> ConvertedModule:
    found: ConvertedModule = pickle.loads(pickle.dumps(module))
    return found


def converted(policy: str = "matmult:bf16") -> ConvertedModule:
    return ft.convert(Net(), (torch.ones(4, 8), 2.0), policy, ({0: Dim("rows")}, None))


def saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


COPIES = pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled, saved])


@COPIES
def test_a_copy_computes_the_same(copied: Callable[[Any], Any]) -> None:
    low = converted()
    state = {name: t.clone() for name, t in low.state_dict().items()}
    other = copied(low)
    for rows in (4, 6):
        x = torch.randn(rows, 8)
        low.load_state_dict(state)
        expected = low(x, 2.0)
        other.load_state_dict(state)
        got = other(x, 2.0)
        assert type(got) is Pair
        for one, two in zip(tree_leaves(expected), tree_leaves(got), strict=True):
            assert torch.equal(one, two)


@COPIES
def test_a_copy_has_the_plan_and_checks_its_inputs(copied: Callable[[Any], Any]) -> None:
    low = converted()
    for other in (copied(low), copied(copied(low))):
        assert other.finecast_plan == low.finecast_plan
        assert not other.training
        with pytest.raises(UsageError, match=r"'scale' was captured with 2\.0, got 3\.0"):
            other(torch.ones(4, 8), 3.0)


@COPIES
def test_a_copy_warns_of_nothing_of_torchs(copied: Callable[[Any], Any]) -> None:
    low = converted()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied(low)


def test_a_deep_copy_has_tensors_of_its_own() -> None:
    low = converted()
    other = copy.deepcopy(low)
    low(torch.ones(4, 8), 2.0)
    assert not torch.equal(low.get_buffer("calls"), other.get_buffer("calls"))


@COPIES
def test_bodies_are_copied(copied: Callable[[Any], Any]) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x.relu(),))

    low = ft.convert(Branches(), (torch.ones(4, 8),), "none")
    other = copied(low)
    for x in (torch.ones(4, 8), -torch.ones(4, 8)):
        assert torch.equal(other(x), low(x))


@COPIES
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_codes_stay_codes(
    copied: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "compiled_frozen", lambda module, *_: (module, frozenset()))
    x = torch.randn(8, 16)
    low = ft.convert(nn.Sequential(nn.Linear(16, 16)), (x,), "matmult:int8")
    other = copied(low)
    stored = {name: t.dtype for name, t in low.state_dict().items()}
    assert torch.int8 in stored.values()
    assert {name: t.dtype for name, t in other.state_dict().items()} == stored
    assert torch.equal(other(x), low(x))


def test_an_op_of_an_absent_package_is_told() -> None:
    with pytest.raises(ModelError, match="calls nowhere::nothing, which is not known here"):
        StoredOp(namespace="nowhere", name="nothing", overload="default").found()


@pytest.mark.parametrize("policy", ["none", "matmult:bf16"])
def test_training_the_original_on_changes_nothing(policy: str) -> None:
    module, x = Mixed(), torch.randn(4, 8)
    module.norm.weight = module.linear.bias  # tied: one of them is low, or both are fp32
    low = ft.convert(module, (x,), policy)
    expected = low(x)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.add_(1)
    assert torch.equal(low(x), expected)
    if policy == "none":
        tied = [t for _, t in low.named_parameters(remove_duplicate=False) if t.ndim == 1]
        assert len({id(t) for t in tied}) == 2


@pytest.mark.parametrize("change", ["half", "float", "double"])
def test_types_stay_those_of_the_plan(change: str) -> None:
    low = converted()
    outer = nn.Sequential(low)
    x = torch.randn(4, 8)
    state = {name: t.clone() for name, t in low.state_dict().items()}
    expected = low(x, 2.0).product
    with pytest.raises(UsageError, match="its types are those of its plan"):
        getattr(low, change)()
    with pytest.warns(UserWarning, match="its types are those of its plan: it keeps them"):
        getattr(outer, change)()
    assert {name: t.dtype for name, t in low.state_dict().items()} == {
        name: t.dtype for name, t in state.items()
    }
    low.load_state_dict(state)
    assert torch.equal(low(x, 2.0).product, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_all_modules_around_change_their_types(dtype: torch.dtype) -> None:
    # An error in the middle would leave those before in another type than those behind.
    low = ft.convert(nn.Linear(8, 8), (torch.ones(4, 8),), "matmult:bf16")
    outer = nn.Sequential(nn.Linear(8, 8), low, nn.Linear(8, 8))
    with pytest.warns(UserWarning, match="modules around it did change"):
        outer.to(dtype)
    assert {t.dtype for part in (outer[0], outer[2]) for t in part.parameters()} == {dtype}
    with pytest.raises(UsageError, match=r"was captured with torch.float32, got"):
        outer(torch.ones(4, 8, dtype=dtype))


def test_a_change_of_device_and_type_moves_and_keeps_types() -> None:
    low = ft.convert(nn.Linear(8, 8), (torch.ones(4, 8),), "matmult:bf16")
    with pytest.warns(UserWarning, match="it keeps them"):
        nn.Sequential(low).to("meta", torch.float16)
    assert {(t.device.type, t.dtype) for t in low.parameters()} == {("meta", torch.bfloat16)}


class Mixed(nn.Module):
    """A product that is low and a norm that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("around", [False, True])
def test_the_state_of_the_original_is_refused_whole(*, strict: bool, around: bool) -> None:
    module = Mixed()
    low: nn.Module = ft.convert(module, (torch.ones(4, 8),), "matmult:bf16")
    before = {name: t.clone() for name, t in low.state_dict().items()}
    assert "norm.weight" in before
    state = {name: t + 1 for name, t in module.state_dict().items()}
    outer = nn.Sequential(low)
    target = outer if around else low
    given = {f"0.{name}": t for name, t in state.items()} if around else state
    with pytest.raises(RuntimeError, match="Load the state into the module that it was") as e:
        target.load_state_dict(given, strict=strict)
    assert "Missing key" not in str(e.value)
    for name, tensor in low.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert target.load_state_dict(target.state_dict(), strict=strict)
    # Without a word of it in the state the module stays as it is, as any module does.
    assert outer.load_state_dict({}, strict=False).missing_keys


@pytest.mark.parametrize("around", [False, True])
def test_scripts_are_refused_with_the_way_to_go(*, around: bool) -> None:
    low: nn.Module = ft.convert(nn.Linear(8, 8), (torch.ones(4, 8),), "matmult:bf16")
    with pytest.raises(UsageError, match=r"reads Python's code.*torch\.jit\.trace"):
        torch.jit.script(nn.Sequential(low) if around else low)


def test_a_module_without_low_types_may_become_fp32() -> None:
    low = converted("none")
    assert low.float() is low


def test_what_the_graph_makes_moves_with_the_module() -> None:
    low = converted().to("meta")
    assert low(torch.ones(4, 8, device="meta"), 2.0).product.device.type == "meta"


def test_training_mode_is_told_to_change_nothing() -> None:
    low = converted()
    with pytest.warns(UserWarning, match="computes as in evaluation mode"):
        low.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low.eval()


def test_tracing_is_not_told_of_the_check() -> None:
    x = torch.randn(3, 8)
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    low = ft.convert(module, (x,), "matmult:bf16")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*Python boolean")
        traced = torch.jit.trace(low, (x,))
    assert torch.equal(traced(x), low(x))  # type: ignore[operator]


@pytest.mark.long
@pytest.mark.parametrize("fullgraph", [False, True])
def test_more_modules_are_compiled_than_dynamo_keeps_graphs_of_one_function(
    fullgraph: bool,
) -> None:
    torch._dynamo.reset()
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        del inputs
        compiled.append(graph)
        return graph

    count = torch._dynamo.config.recompile_limit + 2
    for number in range(count):
        x = torch.randn(3, 8 + number)
        low = ft.convert(nn.Linear(8 + number, 4), (x,), "all:bf16")
        for module in (low, copy.deepcopy(low)):
            call = torch.compile(module, backend=backend, fullgraph=fullgraph)
            assert torch.equal(call(x), low(x))
            with pytest.warns(UserWarning, match="captured with 3 in axis 0, got 5"):
                call(torch.randn(5, 8 + number))
            with pytest.raises(UsageError, match=r"captured with torch\.float32"):
                call(x.double())
    # Each module and its copy: for three rows, and for any number of rows.
    assert len(compiled) == 4 * count


def test_a_compiled_function_may_call_a_converted_module() -> None:
    x = torch.randn(3, 8)
    low = ft.convert(nn.Linear(8, 4), (x,), "all:bf16")
    call = torch.compile(lambda v: low(v) + 1, backend="eager", fullgraph=True)
    assert torch.equal(call(x), low(x) + 1)


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, copy.copy, repickled])
def test_a_program_of_a_converted_module_is_not_converted_again(
    copied: Callable[[ConvertedModule], ConvertedModule], tmp_path: Path
) -> None:
    """Export kept no word of the conversion, and weights were rounded once more."""
    x = torch.ones(4, 8)
    module = ft.convert(nn.Linear(8, 8), (x,), "all:bf16")
    program = torch.export.export(copied(module), (x,))
    torch.export.save(program, tmp_path / "low.pt2")
    for given in (program, tmp_path / "low.pt2"):
        with pytest.raises(ModelError, match="converted by finecast before, to all:bf16"):
            finecast.convert(given, policy="all:fp16", verify=False)
    assert "finecast_notes" not in module.state_dict()


def test_a_converted_program_in_memory_is_not_converted_again() -> None:
    program = torch.export.export(Net(), (torch.ones(4, 8), 2.0))
    low = finecast.convert(program, policy="all:bf16", verify=False).model
    with pytest.raises(ModelError, match="converted by finecast before, to all:bf16"):
        finecast.convert(low, policy="all:fp16", verify=False)


@pytest.mark.parametrize("notes", [b"", b"\xff", b"[]", b'{"policy": 1}', b'{"a": "b"}'])
def test_a_buffer_of_another_tool_under_that_name_is_no_note(notes: bytes) -> None:
    net = Net()
    array = torch.tensor([*notes], dtype=torch.uint8)
    net.register_buffer("finecast_notes", array, persistent=False)
    program = torch.export.export(net, (torch.ones(4, 8), 2.0))
    found = provenance_in(program)
    assert found is None or found.policy == "1"
