"""Products in fp8 and tf32: which ops of a training graph may be some, and how it states them.

In fp8 a kernel multiplies codes. Each row of the first matrix and each column of the second
has a scale, found in each run, by which its largest number becomes the largest code: of e4m3,
or of e5m2 for gradients, which need more range and fewer digits. In tf32 a kernel of a GPU
reads 11 bits of the digits of fp32. Both give fp32, and on CPUs the same numbers, slowly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch

from finecast import Format, Plan, Policy
from finecast.engines.torch import tf32_products
from finecast.errors import UsageError
from finecast.frontends.torch import PRODUCTS_OF_VALUES, FxBinding, conversion, rounded_to
from finecast.graph import TANGENTS, Graph, Node, Value, backward_ops
from finecast.numbers import WHOLE_ROW, Dynamic, Encodings, Rounder
from finecast.rules import KEEP, Context, Rule, Ruling

FP8: Final = Format.FP8_DYNAMIC_ROW
_SINCE: Final = {FP8: (8, 9), Format.TF32: (8, 0)}
"""The first compute capabilities of GPUs with products in these formats."""
_IN_TF32: Final = PRODUCTS_OF_VALUES | {"aten::bmm": (0, 1)}
_CODES: Final = {False: torch.float8_e4m3fn, True: torch.float8_e5m2}
_SCALED_MM: Final = torch.ops.aten._scaled_mm.default
_TF32: Final = Rounder(format=Format.TF32)


# ------------------------------------------------------ which devices and ops have the formats


def formats_of(device: str) -> tuple[Format, ...]:
    """The formats of products alone in which a device is fast: CPUs are in none."""
    if device != "cuda":
        return ()
    capability = torch.cuda.get_device_capability()
    return tuple(fmt for fmt, since in _SINCE.items() if capability >= since)


def check_device(policy: Policy, device: str) -> None:
    """Raise UsageError for a format of products that the device has no kernels for."""
    for fmt in policy.formats:
        if device == "cpu" or fmt.encodes_results or fmt in formats_of(device):
            continue
        since = ".".join(map(str, _SINCE[fmt]))
        raise UsageError(
            f"{fmt.label} on {device}: it takes a CUDA GPU of compute capability {since}",
            where="policy",
            fix="use bf16 or fp16",
        )


def _judge(node: Node, context: Context) -> Ruling | None:
    """Products of two matrices may have these formats; their encodings are noted."""
    fmt = context.low
    if fmt.encodes_results or node.format is not Format.FP32:
        return None
    places = (PRODUCTS_OF_VALUES if fmt is FP8 else _IN_TF32).get(node.native)
    if places is None:
        return Ruling(permits=KEEP, text=f"no kernel here computes {node.op} in {fmt.label}")
    if fmt is not FP8:
        return None
    operands = [context.graph.read(node, index) for index in places]
    gradients = [_is_gradient(context.graph, v) for v in operands]
    sizes = [() if v is None else v.shape or () for v in operands]
    why = _unfit(sizes, fmt) or ("both factors are gradients" if all(gradients) else "")
    if why:
        return Ruling(permits=KEEP, text=f"no kernel in {fmt.label}: {why}")
    context.encodings[node.id] = Encodings(
        operands={
            index: Dynamic(format=fmt, group=WHOLE_ROW, axis=axis, gradient=gradient)
            for index, axis, gradient in zip(places, (-1, -2), gradients, strict=True)
        }
    )
    return None


def _is_gradient(graph: Graph, value: Value | None) -> bool:
    if value is None or value.is_input:
        return value is not None and value.name.startswith(TANGENTS)
    return value.producer in graph.once(backward_ops)


def _unfit(sizes: list[Any], fmt: Format) -> str:
    """Why no kernel takes matrices of these sizes; empty if one does."""
    (_, inner), columns = sizes
    multiple = fmt.size_multiple
    if all(isinstance(size, int) and size % multiple == 0 for size in (inner, *columns)):
        return ""
    shown = " by ".join("x".join(map(str, size)) for size in sizes)
    return (
        f"the matrices are {shown}, all but the number of rows has to be a multiple of"
        f" {multiple}"
    )


PRODUCTS: Final = Rule(name="products", judge=_judge, hard=True)
"""In place of the rule ``calibration``: scales are not found on data, but in each run."""


# --------------------------------------------------------------------- how a graph states them


def by_casts(plan: Plan) -> Plan:
    """``plan`` with these products in fp32: what is left is stated by casts."""
    decisions = tuple(
        d
        if d.format.encodes_results
        else replace(d, format=Format.FP32, encodings=Encodings())
        for d in plan.decisions
    )
    return replace(plan, decisions=decisions)


def state_products(graph: Graph, binding: FxBinding, plan: Plan) -> None:
    """Have these products of ``plan`` computed so, in the FX graph, which has their casts.

    They are functions of this module until the graph is traced again. A product in fp8 whose
    result all readers cast to bf16 gives bf16.
    """
    for node in graph.float_nodes:
        fmt = plan.formats.get(node.name, Format.FP32)
        if fmt.encodes_results:
            continue
        product = binding.nodes[node.id]
        if fmt is not FP8:
            product.target = tf32_product
            continue
        operands = plan.encodings[node.name].operands
        gradients = tuple(
            isinstance(to := operands[index], Dynamic) and to.gradient
            for index in PRODUCTS_OF_VALUES[node.native]
        )
        # Kernels with scales of rows take a second matrix of e4m3 alone.
        low = not gradients[1] and not product.kwargs
        casts = list(product.users)
        low = low and bool(casts) and all(conversion(c) is torch.bfloat16 for c in casts)
        product.target = scaled_product
        product.kwargs = {**product.kwargs, "gradients": gradients, "low": low}
        if low:
            product.meta["val"] = product.meta["val"].to(torch.bfloat16)
            for cast in casts:
                cast.replace_all_uses_with(product)
                product.graph.erase_node(cast)


def scaled_product(
    *matrices: torch.Tensor,
    gradients: tuple[bool, bool],
    low: bool = False,
    alpha: float = 1,
    beta: float = 1,
) -> torch.Tensor:
    """The product of the last two matrices on codes, plus what comes before them.

    Args:
        matrices: As of ``mm`` or ``addmm``, in fp32.
        gradients: Which of the two are gradients.
        low: Whether the result is bf16, by the kernel itself.
        alpha: As of ``addmm``.
        beta: As of ``addmm``.
    """
    *added, first, second = matrices
    rows, by_row = _coded(first, gradient=gradients[0])
    columns, by_column = _coded(second.t(), gradient=gradients[1])
    if low:
        bias = added[0].to(torch.bfloat16) if added else None
        scales = by_row, by_column.t()
        return _SCALED_MM(rows, columns.t(), *scales, bias, None, torch.bfloat16)
    unscaled = by_row.new_ones(())
    sums = _SCALED_MM(rows, columns.t(), unscaled, unscaled, None, None, torch.float32)
    return _plus(sums * by_row * by_column.t(), added, alpha, beta)


def _coded(matrix: torch.Tensor, *, gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of a matrix in the order of its rows, and the scale of each row."""
    to = Dynamic(format=FP8, group=WHOLE_ROW, gradient=gradient)
    ends = matrix.abs().amax(-1, keepdim=True).clamp_min(float(to.least))
    scales = ends / float(to.largest)
    return (matrix / scales).to(_CODES[gradient]).contiguous(), scales


def tf32_product(*matrices: torch.Tensor, alpha: float = 1, beta: float = 1) -> torch.Tensor:
    """The product of the last two matrices in tf32, plus what comes before them."""
    *added, first, second = matrices
    return _plus(torch.ops.finecast.tf32_product(first, second), added, alpha, beta)


def _plus(
    product: torch.Tensor, added: list[torch.Tensor], alpha: float, beta: float
) -> torch.Tensor:
    scaled = product if alpha == 1 else alpha * product
    return scaled if not added else scaled + (added[0] if beta == 1 else beta * added[0])


@torch.library.custom_op("finecast::tf32_product", mutates_args=())
def _in_tf32(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """One op of compiled graphs, as the switch for tf32 holds for all products otherwise."""
    if first.is_cuda:
        with tf32_products():
            return first @ second
    return rounded_to(first, _TF32) @ rounded_to(second, _TF32)


@_in_tf32.register_fake
def _(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first @ second
