"""RAF's rules, and its test cases as counted casts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import finecast.torch as ft  # noqa: E402
from finecast import rules  # noqa: E402
from finecast.edits import InsertCast, edits  # noqa: E402
from finecast.errors import ModelError  # noqa: E402
from finecast.formats import Format  # noqa: E402
from finecast.frontends import torch as frontend  # noqa: E402
from finecast.frontends.torch.raf import never, propagate  # noqa: E402
from finecast.graph import Graph  # noqa: E402
from finecast.rules import NodeView  # noqa: E402
from finecast.rules.override import active  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Function(nn.Module):
    def __init__(self, body: Callable[..., object]) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: torch.Tensor) -> object:
        return self.body(*args)


def graph_of(body: Callable[..., object], count: int = 1) -> Graph:
    inputs = tuple(torch.randn(4, 4) for _ in range(count))
    return frontend.capture(Function(body), inputs).graph


def casts(graph: Graph) -> list[str]:
    found = edits(graph, propagate(graph, Format.FP16))
    return sorted(e.to.label for e in found if isinstance(e, InsertCast))


def test_always_takes_its_inputs_down_and_the_result_up() -> None:
    assert casts(graph_of(lambda x, w: x @ w, 2)) == ["fp16", "fp16", "fp32"]


def test_one_cast_serves_two_readers() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cat([x @ w, x @ (w @ w)])

    # x and w once each; the concatenation of two low ones is low; up at the end.
    assert casts(graph_of(body, 2)) == ["fp16", "fp16", "fp32"]


def test_tuple_outputs_follow() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.split(x @ w, 2))

    assert casts(graph_of(body, 2)) == ["fp16", "fp16", "fp32", "fp32"]


def test_never_takes_its_inputs_up() -> None:
    assert casts(graph_of(lambda x, w: torch.softmax(x @ w, -1), 2)) == [
        "fp16",
        "fp16",
        "fp32",
    ]


def test_existing_cast_beside_an_always_op_is_not_doubled() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.half() @ w.half()).float()

    assert casts(graph_of(body, 2)) == []


def test_existing_cast_beside_a_follow_op() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w).half()

    # The model's own cast reads what it is given: nothing goes up before it.
    assert casts(graph_of(body, 2)) == ["fp16", "fp16"]


@pytest.mark.parametrize(("low", "expected"), [(2, "fp32"), (3, "fp16")])
def test_concatenate_needs_a_strict_majority(low: int, expected: str) -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        products = [x @ w for _ in range(low)]
        return torch.cat([*products, *(torch.exp(x) for _ in range(5 - low))])

    graph = graph_of(body, 2)
    found = propagate(graph, Format.FP16)
    (concat,) = [n for n in graph.nodes if n.op == "concat"]
    assert found[concat.id].label == expected


def test_concatenate_of_six_stays_high() -> None:
    graph = graph_of(lambda x, w: torch.cat([x @ w] * 6), 2)
    (concat,) = [n for n in graph.nodes if n.op == "concat"]
    assert propagate(graph, Format.FP16)[concat.id] is Format.FP32


def test_add_is_low_if_either_side_is() -> None:
    graph = graph_of(lambda x, w: torch.exp(x) + x @ w, 2)
    (add,) = [n for n in graph.nodes if n.op == "add"]
    assert propagate(graph, Format.FP16)[add.id] is Format.FP16


def test_where_follows_the_majority() -> None:
    graph = graph_of(lambda x, w: torch.where(x > 0, x @ w, w @ x), 2)
    (where,) = [n for n in graph.nodes if n.op == "where"]
    assert propagate(graph, Format.FP16)[where.id] is Format.FP16


def test_in_place_updates_follow() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        y.relu_()
        return y

    assert casts(graph_of(body, 2)) == ["fp16", "fp16", "fp32"]


def test_batch_norm_in_inference_is_low_with_statistics_in_fp32() -> None:
    net = nn.BatchNorm2d(3).eval()
    graph = frontend.capture(net, (torch.randn(2, 3, 4, 4),)).graph
    (norm,) = [n for n in graph.nodes if n.op == "batch_norm"]
    assert propagate(graph, Format.FP16)[norm.id] is Format.FP16
    assert [v.name for v in graph.following_inputs(norm)] == ["input_1"]


def test_missing_rules_are_reported_together_with_counts() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.lgamma(x) + torch.lgamma(x) + torch.i0(x)

    with pytest.raises(ModelError, match=r"aten::lgamma \(2\), aten::i0 \(1\)"):
        propagate(graph_of(body), Format.FP16)
    with rules.override({"aten::lgamma": never, "aten::i0": never}):
        assert set(propagate(graph_of(body), Format.FP16).values()) == {Format.FP32}


def keep(node: NodeView) -> str:
    del node
    return "fp32"


def follow_first(args: Sequence[str | None], ret: object, amp: str) -> list[str | None]:
    del ret
    return [amp if args[0] == amp else "fp32" for _ in args]


def test_overrides_nest_and_are_restored_on_exceptions() -> None:
    assert active() == ()
    with rules.override({"aten::gelu": keep}):
        with pytest.raises(ZeroDivisionError), rules.override({"softmax": keep}):
            _ = 1 / (len(active()) - 2)  # both hold in here
        assert [name for name, _ in active()] == ["aten::gelu"]
    assert active() == ()


def test_an_override_holds_for_the_conversion_in_the_block() -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval(), torch.randn(2, 8)
    with rules.override({"aten::linear": keep}):
        inside = ft.convert(net, (x,), "all:bf16").finecast_plan
    after = ft.convert(net, (x,), "all:bf16").finecast_plan
    assert {d.op: d.format.label for d in inside.decisions}["linear"] == "fp32"
    assert {d.op: d.format.label for d in after.decisions}["linear"] == "bf16"


def test_raf_s_own_signature_of_a_rule() -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval(), torch.randn(2, 8)
    with rules.override({"gelu": lambda args, ret, amp: ["fp32" for _ in args]}):
        plan = ft.convert(net, (x,), "all:bf16").finecast_plan
    assert {d.op: d.format.label for d in plan.decisions}["gelu"] == "fp32"
    with rules.override({"gelu": follow_first}):
        plan = ft.convert(net, (x,), "all:bf16").finecast_plan
    assert {d.op: d.format.label for d in plan.decisions}["gelu"] == "bf16"


def test_raf_as_a_rule_set() -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)).eval(), torch.randn(2, 8)
    plan = ft.convert(net, (x,), "auto:bf16", rule_set="raf").finecast_plan
    formats = {d.op: d.format.label for d in plan.decisions}
    assert formats == {"linear": "bf16", "softmax": "fp32"}
