"""What a backward graph stores, and what it computes where it is read."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode
from torch.fx.experimental.proxy_tensor import make_fx

from finecast_training.ordering import compute_where_read, order_for_memory, order_kernels

SIGMOID = torch.ops.aten.sigmoid.default
CAST = torch.ops.prims.convert_element_type.default


def gradients(
    saved: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two sums and a gradient that read an activation, and a product that reads it, too."""
    wide = CAST(saved, torch.float32)
    activation = wide * torch.ops.aten.sigmoid(wide)
    total = torch.ops.aten.sum.dim_IntList(activation * gradient, [0])
    product = torch.ops.aten.mm(CAST(activation, torch.bfloat16).t(), saved)
    return total, activation + gradient, product


def traced(dtype: torch.dtype) -> tuple[GraphModule, list[torch.Tensor]]:
    torch.manual_seed(0)
    inputs = [torch.randn(8, 4).to(dtype), torch.randn(8, 4)]
    return make_fx(gradients, tracing_mode="fake")(*inputs), inputs


def readers(graph: Graph) -> list[list[FxNode]]:
    return [list(node.users) for node in graph.find_nodes(op="call_function", target=SIGMOID)]


def test_what_follows_from_inputs_is_computed_by_each_reader() -> None:
    module, inputs = traced(torch.bfloat16)
    before = module(*inputs)
    assert len(readers(module.graph)) == 1
    compute_where_read(module.graph)
    module.graph.lint()
    module.recompile()
    assert len(readers(module.graph)) == 3  # the sum's, the gradient's, the product's
    for got, wanted in zip(module(*inputs), before, strict=True):
        assert torch.equal(got, wanted)


def test_what_takes_fewer_bytes_than_its_inputs_is_stored() -> None:
    def narrowed(
        saved: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        low = CAST(saved, torch.bfloat16)
        return low * gradient, low + gradient

    inputs = [torch.randn(8, 4), torch.randn(8, 4).bfloat16()]
    module = make_fx(narrowed, tracing_mode="fake")(*inputs)
    compute_where_read(module.graph)
    assert len(module.graph.find_nodes(op="call_function", target=CAST)) == 1


def test_a_split_of_an_input_gives_no_tensor() -> None:
    def halves(
        saved: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = torch.ops.aten.split.Tensor(saved, 4)
        return low * gradient, high + gradient

    inputs = [torch.randn(8, 4), torch.randn(4, 4)]
    module = make_fx(halves, tracing_mode="fake")(*inputs)
    before = module(*inputs)
    compute_where_read(module.graph)
    order_for_memory(module.graph)
    module.recompile()
    for got, wanted in zip(module(*inputs), before, strict=True):
        assert torch.equal(got, wanted)


def test_what_a_sum_reads_no_more_is_gone() -> None:
    """Left behind, a view would count as a reader of what Inductor then stores in fp32."""

    def back(saved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = torch.ops.aten.exp(CAST(saved, torch.float32))
        rows = torch.ops.aten.view(gradient, [8, 4])
        low = CAST(gradient, torch.bfloat16)
        return torch.ops.aten.sum.dim_IntList(rows, [0]), low

    inputs = [torch.randn(2, 4, 4).bfloat16()]
    module = make_fx(back, tracing_mode="fake")(*inputs)
    before = module(*inputs)
    order_for_memory(module.graph)
    module.recompile()
    for got, wanted in zip(module(*inputs), before, strict=True):
        assert torch.equal(got, wanted)
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    assert all(node.users for node in nodes)
    exponentials = [node for node in nodes if node.target is torch.ops.aten.exp.default]
    assert [len(node.users) for node in exponentials] == [1, 1]


@dataclass(frozen=True)
class Kernel:
    """What an order needs to know of one of Inductor's."""

    min_order: int
    result: str
    reads: tuple[str, ...] = ()

    def get_buffer_names(self) -> list[str]:
        return [self.result]

    @property
    def unmet_dependencies(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.reads]


def test_a_kernel_of_an_early_and_a_late_sum_does_not_call_products_before_their_turn() -> (
    None
):
    gradient = Kernel(0, "gradient")
    weights = Kernel(2, "weights", ("gradient",))
    back = Kernel(3, "back", ("gradient",))
    sums = Kernel(1, "sums", ("gradient", "back"))  # the second one reads what a product gives
    last = Kernel(4, "last", ("back",))
    # As Inductor has them: the sums at the place of the first, and before them what they read.
    kernels: list[Any] = [gradient, back, sums, weights, last]
    assert order_kernels(kernels) == [gradient, weights, back, sums, last]
