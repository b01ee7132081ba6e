"""The tables of ATen's mixed types, against the schemas that PyTorch itself states."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from finecast.frontends.torch.aten import FIXED
from finecast.frontends.torch.reader import read

STATISTICS = {
    *("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd"),
    *("mean", "rstd", "save_var", "reserveSpace"),
}


@pytest.mark.parametrize("native", [n for n in FIXED if "norm" in n or "backward" in n])
def test_what_keeps_fp32_beside_low_inputs_are_statistics(native: str) -> None:
    kept = {"logsumexp"} if "attention" in native else STATISTICS
    schema = getattr(torch.ops.aten, native.removeprefix("aten::")).default._schema
    tensors = {a.name for a in schema.arguments if "Tensor" in str(a.type)}
    assert {*FIXED[native][0]} == kept & tensors


@pytest.mark.parametrize("masked", [False, True])
def test_log_sum_exp_keeps_fp32_where_a_tensor_before_it_is_left_out(masked: bool) -> None:
    """The backward pass on GPUs has a mask, or none, before what the forward pass saved."""
    graph, attention = Graph(), torch.ops.aten._scaled_dot_product_efficient_attention_backward
    with FakeTensorMode():
        head, rows = torch.empty(2, 4, 8, 16), torch.empty(2, 4, 8)
        mask, seed = torch.empty(2, 4, 8, 8), torch.empty((), dtype=torch.int64)
    given = {
        **dict.fromkeys(("grad", "query", "key", "value"), head),
        **({"mask": mask} if masked else {}),
        "out": head,
        "saved": rows,
        "seed": seed,
        "offset": seed,
    }
    ports = {name: graph.placeholder(name) for name in given}
    for name, node in ports.items():
        node.meta["val"] = given[name]
    first = [ports.get(n) for n in ("grad", "query", "key", "value", "mask")]
    then = [ports[n] for n in ("out", "saved", "seed", "offset")]
    call = graph.call_function(attention.default, (*first, *then, 0.0, [True] * 4))
    call.meta["val"] = (head, head, head, mask)
    graph.output((call,))
    found, _ = read(GraphModule({}, graph))
    (node,) = found.nodes
    followed = dict(zip(given, node.follows_in, strict=True))
    fixed = {"saved", "seed", "offset"}
    assert followed == {name: name not in fixed for name in given}
