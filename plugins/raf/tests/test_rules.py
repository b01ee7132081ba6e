"""RAF's rules, and its test cases as counted casts."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast.torch as ft
from finecast import rules
from finecast.engines.torch import TorchEngine
from finecast.errors import ModelError, UsageError
from finecast.frontends import torch as frontend
from finecast.frontends.torch import TorchPrepared
from finecast.graph import Graph
from finecast.native.torch.planning import planner_of
from finecast.numbers.formats import Format
from finecast.planning.edits import InsertCast, edits
from finecast.planning.plan import Plan
from finecast.rules import NodeView
from finecast.rules.override import active
from finecast.rules.policy import Policy
from finecast_raf.rule_set import never, propagate
from tests.graph.text import from_text
from tests.torch.planned import plan_of

Held = Mapping[str, Callable[..., Any]]

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


@pytest.mark.filterwarnings("ignore:fp16 runs at")
@pytest.mark.filterwarnings("ignore:nothing was converted")
@pytest.mark.parametrize(
    ("high", "low", "expected"), [(2, 3, "fp16"), (3, 2, "fp32"), (3, 4, "fp32")]
)
def test_concatenate_counts_inputs_that_are_low_in_the_model(
    high: int, low: int, expected: str
) -> None:
    module = Function(lambda *inputs: torch.cat(inputs))
    inputs = [torch.randn(2, 3) for _ in range(high)] + [torch.randn(2, 3).half()] * low
    captured = frontend.capture(module, inputs)
    (concat,) = captured.graph.nodes
    assert propagate(captured.graph, Format.FP16)[concat.id].label == expected
    low_module = ft.convert(module, inputs, "all:fp16", rule_set="raf")
    assert low_module(*inputs).dtype is torch.float32
    # What would be a mixture of two low formats, which PyTorch computes in fp32, stays there.
    assert propagate(captured.graph, Format.BF16)[concat.id] is Format.FP32


def test_mixtures_of_low_formats_stay_fp32() -> None:
    module = Function(lambda x, y, z: (x + y.half(), x + z))
    inputs = (torch.randn(4), torch.randn(4), torch.randn(4))
    result = ft.convert(module, inputs, "all:bf16")
    for got, want in zip(result(*inputs), module(*inputs), strict=True):
        assert got.dtype is want.dtype
        assert torch.allclose(got, want, atol=0.05)


def test_concatenate_of_six_stays_high() -> None:
    graph = graph_of(lambda x, w: torch.cat([x @ w] * 6), 2)
    (concat,) = [n for n in graph.nodes if n.op == "concat"]
    assert propagate(graph, Format.FP16)[concat.id] is Format.FP32


def test_add_is_low_if_either_side_is() -> None:
    graph = graph_of(lambda x, w: torch.exp(x) + x @ w, 2)
    (add,) = [n for n in graph.nodes if n.op == "add"]
    assert propagate(graph, Format.FP16)[add.id] is Format.FP16


def in_two_outputs(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.conv2d(x[None, None], w[None, None])
    return y, torch.relu(y)


def reusing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    first = x @ w
    return torch.softmax(first, -1) + torch.exp(first) + x @ w


def writing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.copy_(x @ w)


def adding_in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    product = x @ w
    return product.add_(w)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # Beside RAF's counts: outputs keep fp32 here, so that low ones are cast up.
        (in_two_outputs, ["fp16", "fp16", "fp32", "fp32"]),
        # One cast of the product serves softmax and exp; RAF makes one for each.
        (reusing, ["fp16", "fp16", "fp16", "fp32", "fp32"]),
        (lambda x, w: torch.cat(torch.split(x @ w, 2)), ["fp16", "fp16", "fp32"]),
        # Half of the inputs are low: so is the comparison, and the constant is cast.
        (lambda x, w: (x @ w) <= torch.ones(4, 4), ["fp16", "fp16", "fp16"]),
        (writing, ["fp16", "fp16", "fp32"]),
        (adding_in_place, ["fp16", "fp16", "fp32"]),
        (lambda x, w: torch.where(x > 0, x @ w, w), ["fp16", "fp16", "fp32"]),
    ],
)
def test_casts_as_raf_s_tests_count_them(
    body: Callable[..., object], expected: list[str]
) -> None:
    assert casts(graph_of(body, 2)) == expected


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
    assert [v.name for v in graph.following_inputs(norm)] == ["input"]


def test_batch_norm_in_training_is_low_with_statistics_in_fp32() -> None:
    graph = from_text(
        "input %0 x fp32\ninput %1 scale fp32\n"
        "node n batch_norm_training aten::native_batch_norm fp32 (%0, ~%1, ~%1, ~%1, ~%1)"
        " -> (%2 y fp32, ~%3 mean fp32, ~%4 deviation fp32)\n"
        "output %2\noutput %3\noutput %4\n"
    )
    assert casts(graph) == ["fp16", "fp32"]  # x, and the result


@pytest.mark.parametrize(("op", "expected"), [("sigmoid", "bf16"), ("tanh", "fp32")])
def test_gradients_of_sigmoid_follow_and_of_tanh_never(op: str, expected: str) -> None:
    graph = from_text(
        "input %0 x fp32\ninput %1 w fp32\n"
        "node m matmul aten::mm fp32 (%0, %1) -> (%2 y fp32)\n"
        f"node g sigmoid_backward aten::{op}_backward fp32 (%2, %2) -> (%3 z fp32)\n"
        "output %3\n"
    )
    assert propagate(graph, Format.BF16)[1].label == expected


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
        inside = plan_of(ft.convert(net, (x,), "all:bf16"))
    after = plan_of(ft.convert(net, (x,), "all:bf16"))
    assert {d.op: d.format.label for d in inside.decisions}["linear"] == "fp32"
    assert {d.op: d.format.label for d in after.decisions}["linear"] == "bf16"


def formats_under(held: Held, **options: Any) -> dict[str, str]:
    """Format by op of a small net, converted with these overrides."""
    net, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval(), torch.randn(2, 8)
    body = Function(lambda x: net(x) + x)
    body.net = net
    with rules.override(held):
        plan = plan_of(ft.convert(body, (x,), "all:bf16", **options))
    return {d.op: d.format.label for d in plan.decisions}


def lowest_under(
    held: Mapping[str, Callable[..., Any]], rule_set: str = "finecast"
) -> dict[str, str]:
    """The lowest format that the rules leave each op, by op and by node, of the same net."""
    net, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval(), torch.randn(2, 8)
    body = Function(lambda x: net(x) + x)
    body.net = net
    policy = Policy.parse("all:bf16")
    with rules.override(held):
        captured = frontend.capture(body, (x,))
        prepared = TorchPrepared(graph=captured.graph, source=captured)
        planner = planner_of(prepared, policy, TorchEngine(), rule_set)
    decisions = planner.lowest().decisions
    return {name: d.format.label for d in decisions for name in (d.op, d.node)}


def test_raf_s_own_signature_of_a_rule() -> None:
    assert formats_under({"gelu": never})["gelu"] == "fp32"
    assert lowest_under({"gelu": never})["gelu"] == "fp32"
    assert lowest_under({"gelu": follow_first})["gelu"] == "bf16"


def test_the_page_of_raf_names_the_module_of_its_helpers() -> None:
    page = (Path(__file__).parents[3] / "docs/migrate/raf.md").read_text()
    (module,) = re.findall(r"`PrimType` \| the same names in `([\w.]+)`", page)
    found = importlib.import_module(module)
    assert all(hasattr(found, name) for name in ("check_dtype", "gen_hint_helper", "PrimType"))


@pytest.mark.parametrize("rule_set", ["finecast", "raf"])
def test_the_seed_s_rules_run_as_they_are_written(rule_set: str) -> None:
    from finecast_raf import PrimType, check_dtype, gen_hint_helper

    def cast_bias_add(args: Any, ret_type: Any, amp_dtype: Any) -> Any:
        low = check_dtype(args[0].checked_type, amp_dtype)
        target_dtype = amp_dtype if low else "float32"
        return [
            gen_hint_helper(args[0].checked_type, target_dtype),
            gen_hint_helper(args[0].checked_type, target_dtype),
            PrimType(None),
        ]

    def never_cast_bias_add(args: Any, ret_type: Any, amp_dtype: Any) -> Any:
        return [PrimType("float32"), PrimType("float32"), PrimType(None)]

    # The rules hold for the bias of the linear layer, which is added behind it here.
    held = lowest_under({"raf.op.bias_add": cast_bias_add}, rule_set)
    assert held["net.0/linear_add"] == "bf16"
    never_low = lowest_under({"raf.op.bias_add": never_cast_bias_add}, rule_set)
    assert never_low["net.0/linear_add"] == "fp32"
    assert never_low["net.0/linear_linear"] == "bf16"
    # The residual is no bias. In RAF's set it is fp32, as gelu is.
    for found in (held, never_low):
        assert found["add"] == ("fp32" if rule_set == "raf" else "bf16")


@pytest.mark.parametrize("rule_set", ["finecast", "raf"])
@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        (["bf16", "bfloat16"], "bf16"),
        ([torch.bfloat16, Format.BF16], "bf16"),
        (["float32", "fp32"], "fp32"),
        ([None, None], "fp32"),  # as it is in the model
        (["bf16", None], "fp32"),  # one of them stays fp32: so does the op, which holds both
        (["float16", "float"], "fp32"),
    ],
)
def test_hints_by_any_name_of_a_format(hints: list[Any], expected: str, rule_set: str) -> None:
    found = formats_under({"aten::add": lambda args, ret, amp: hints}, rule_set=rule_set)
    assert found["add"] == expected


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda args, ret, amp: ["fp32"], "1 hints for 2 arguments"),
        (lambda args, ret, amp: "fp32", "return a list"),
        (lambda args, ret, amp: ["fp61", None], "unknown format 'fp61'"),
        (lambda args, ret, amp: [args[7]], "failed: IndexError"),
    ],
)
def test_what_is_no_answer_of_a_rule_is_an_error(
    rule: Callable[..., Any], message: str
) -> None:
    for rule_set in ("finecast", "raf"):
        with pytest.raises(UsageError, match=rf"aten::add.*{message}"):
            formats_under({"add": rule}, rule_set=rule_set)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "softmaxx",
            r"'softmaxx' does not match any op of the model .rules.override.*use one of",
        ),
        ("aten::gleu", "did you mean gelu"),
        ("raf.op.conv2d", "does not match any op"),
        ("raf.op.qelu", "unknown op 'raf.op.qelu'"),
    ],
)
def test_overrides_that_match_nothing_are_errors(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        formats_under({name: never})


@pytest.mark.usefixtures("op_by_op")
def test_an_override_held_when_a_net_is_compiled_holds_for_good() -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval(), torch.randn(2, 8)
    with rules.override({"addmm": keep, "aten::adddmm": keep}):
        step = ft.compile(net, "all:bf16")
    with pytest.warns(UserWarning, match=r"'aten::adddmm' matches no op.*addmm"):
        step(x)
    (plan,) = step.finecast_plans
    formats = {d.op: d.format.label for d in plan.decisions}
    assert formats.pop("addmm") == "fp32"
    assert "bf16" in formats.values()


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("by_name", [False, True])
def test_an_override_around_a_call_holds_for_what_is_compiled_in_it(
    by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the backend by its name, which knows nothing of earlier calls."""
    net, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.randn(64, 64)
    compiled = torch.compile(net, backend="finecast") if by_name else ft.compile(net)
    plans: list[Plan] = []
    plan_of = ft.Backend.plan

    def noted(self: ft.Backend, *args: Any) -> Plan:
        plans.append(plan_of(self, *args))
        return plans[-1]

    monkeypatch.setattr(ft.Backend, "plan", noted)

    def format_of_addmm() -> str:
        torch._dynamo.reset()
        made = len(plans)
        compiled(x).sum().backward()
        (plan,) = plans[made:]
        return {d.op: d.format.label for d in plan.decisions}["addmm"]

    assert format_of_addmm() == "bf16"
    with rules.override({"addmm": keep}):
        assert format_of_addmm() == "fp32"
    assert format_of_addmm() == "bf16"


@pytest.mark.usefixtures("op_by_op")
def test_raf_s_set_covers_what_a_transformer_layer_trains_with() -> None:
    def attend(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.layer_norm(x @ w, [4])[:, None]
        return nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.1)

    step = ft.compile(attend, "all:bf16", rule_set="raf")
    w = torch.randn(4, 4, requires_grad=True)
    step(torch.randn(2, 5, 4), w)  # plans forward and backward together
    (plan,) = step.finecast_plans
    formats = {d.op: d.format.label for d in plan.decisions}
    assert (formats["matmul"], formats["softmax"]) == ("bf16", "fp32")
    assert (formats["softmax_backward"], formats["layer_norm_backward"]) == ("fp32", "bf16")


def test_raf_as_a_rule_set() -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)).eval(), torch.randn(2, 8)
    plan = plan_of(ft.convert(net, (x,), "auto:bf16", rule_set="raf"))
    formats = {d.op: d.format.label for d in plan.decisions}
    assert formats == {"linear": "bf16", "softmax": "fp32"}
