"""Quantize and dequantize nodes, by which PyTorch states values and constants as 8-bit codes.

Inductor's passes for x86 recognise those of int8 around products and run these on integers.
On GPUs, and in fp8, products are stated as such (``scaled_products``): no pass recognises
them.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import numpy as np
import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from finecast.frontends.torch.aten import named_arguments, native_name
from finecast.frontends.torch.restating import conversion
from finecast.graph import Node
from finecast.numbers.encodings import Dynamic, Scaled
from finecast.numbers.formats import Format, Grid

_CAST: Final = torch.ops.aten._to_copy.default
_CONV: Final = torch.ops.aten.conv2d.default
_CONV_PADDING_BY_NAME: Final = torch.ops.aten.conv2d.padding
_BY_AXIS: Final = ("stride", "padding", "dilation")
_LINEAR: Final = torch.ops.aten.linear.default
_RESHAPE: Final = torch.ops.aten.reshape.default
_RESHAPES: Final = frozenset({"aten::view", "aten::_unsafe_view", "aten::reshape"})
CODES: Final = (
    Format.INT8,
    Format.INT8_DYNAMIC_ROW,
    Format.FP8,
    Format.FP8_DYNAMIC_ROW,
)
"""Formats of codes that modules state."""
_FUSED: Final = frozenset({"aten::linear", "aten::conv2d"})
"""Ops on integers that Inductor's passes for x86 fuse into one kernel."""
PRODUCTS_OF_VALUES: Final = {"aten::mm": (0, 1), "aten::addmm": (1, 2)}
"""Products of two matrices that training graphs state on codes, and where they read these."""
_ROWS: Final = (1.0, 128, 1, 255, torch.uint8)
"""How a row is encoded after the division by its scale: Inductor's kernels take values as
unsigned codes, with one scale for the whole tensor."""
_ADD: Final = torch.ops.aten.add.Tensor
_MUL: Final = torch.ops.aten.mul.Tensor
BIASED: Final = "finecast_biased"
"""In the metadata of a node: it adds the bias of a layer whose rows are scaled."""
ENCODED: Final = "finecast_encoded"
"""In the metadata of a cast to codes: it rounds values, as a plan has it."""
_FP8: Final = torch.float8_e4m3fn
OPS_MODULE: Final = "torch.ao.quantization.fx._decomposed"
"""What registers the ops on codes, as it is imported."""


def coded_ops() -> Any:
    """PyTorch's ops on codes; importing their module registers them."""
    importlib.import_module(OPS_MODULE)
    return torch.ops.quantized_decomposed


def takes_codes(node: Node, fmt: Format = Format.INT8) -> bool:
    """Whether a module can state ``node`` on the codes of ``fmt``."""
    return node.native in _FUSED if fmt is Format.INT8 else node.native == "aten::linear"


def states_product(operand: FxNode, grid: Grid, *, for_gpu: bool) -> bool:
    """Whether products on such codes are stated: for GPUs all are, for CPUs those in fp8."""
    known = operand.meta.get("val")
    on_gpu = for_gpu or (known is not None and known.device.type != "cpu")
    return grid.has_floats or on_gpu


def round_trip(graph: FxGraph, value: FxNode, to: Scaled) -> FxNode:
    """A new node that decodes to fp32 what others before it encode, with one scale."""
    grid = to.grid
    if grid.has_floats:
        steps = called(graph, torch.ops.aten.div.Tensor, value, to.scale[0])
        ends = float(grid.lowest), float(grid.highest)
        steps = called(graph, torch.ops.aten.clamp.default, steps, *ends)
        codes = called(graph, _CAST, steps, dtype=_FP8)
        codes.meta[ENCODED] = True
        back = called(graph, _CAST, codes, dtype=torch.float32)
        return called(graph, _MUL, back, to.scale[0])
    dtype: torch.dtype = getattr(torch, grid.dtype.name)
    range_of = (to.scale[0], to.zero_point, grid.lowest, grid.highest, dtype)
    codes = called(graph, coded_ops().quantize_per_tensor.default, value, *range_of)
    return called(graph, coded_ops().dequantize_per_tensor.default, codes, *range_of)


def rounded_rows(
    graph: FxGraph, value: FxNode, to: Dynamic, *, for_gpu: bool = False
) -> tuple[FxNode, FxNode]:
    """New nodes that encode each row of ``value`` by its own scale.

    Gives what is decoded without the scales, and these. ``Dynamic.round`` is their product.
    """
    aten = torch.ops.aten
    # Scales are constants where gradients are computed, as those that are found on data.
    magnitudes = called(graph, aten.abs.default, called(graph, aten.detach.default, value))
    ends = called(graph, aten.amax.default, magnitudes, [-1], True)
    ends = called(graph, aten.clamp_min.default, ends, float(to.least))
    scales = called(graph, aten.div.Tensor, ends, float(to.largest))
    steps = called(graph, aten.div.Tensor, value, scales)
    if states_product(value, to.grid, for_gpu=for_gpu):
        # A quotient may be the largest code times 1 + 2^-23, which is rounded to that code.
        whole = steps if to.grid.has_floats else called(graph, aten.round.default, steps)
        dtype = _FP8 if to.grid.has_floats else torch.int8
        codes = called(graph, _CAST, whole, dtype=dtype)
        codes.meta[ENCODED] = True
        return called(graph, _CAST, codes, dtype=torch.float32), scales
    codes = called(graph, coded_ops().quantize_per_tensor.default, steps, *_ROWS)
    return called(graph, coded_ops().dequantize_per_tensor.default, codes, *_ROWS), scales


def scaled_rows(product: FxNode, scales: FxNode) -> FxNode:
    """Multiply a linear layer's rows by ``scales``, and then add its bias; the new result."""
    arguments, graph, readers = named_arguments(product), product.graph, list(product.users)
    product.args, product.kwargs = (arguments["input"], arguments["weight"]), {}
    with graph.inserting_before(product.next):
        result = called(graph, _MUL, product, scales)
        if (bias := arguments.get("bias")) is not None:
            result = called(graph, _ADD, result, bias)
            result.meta[BIASED] = True
    for reader in readers:
        reader.replace_input_with(product, result)
    return result


def called(
    graph: FxGraph, op: Any, source: FxNode, *args: Any, dtype: torch.dtype | None = None
) -> FxNode:
    """A new node with the fake result of ``op``."""
    typed: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    call = graph.call_function(op, (source, *args), typed)
    plain = (a.meta["val"] if isinstance(a, FxNode) else a for a in call.args)
    call.meta = {**source.meta, "val": op(*plain, **typed)}
    return call


def stored_codes(tensor: torch.Tensor, to: Scaled) -> dict[str, torch.Tensor]:
    """The tensors that a constant is stored as: codes, and scales and zeros of channels."""
    scale = torch.tensor(to.scale, dtype=torch.float32)
    encoded = to.encode(tensor.detach().cpu().numpy())
    if to.grid.has_floats:  # numpy's own types have none of them
        codes = torch.from_numpy(encoded.view(np.uint8)).view(_FP8)
    else:
        codes = torch.from_numpy(encoded)
    parts = {"codes": codes.contiguous(), "scale": scale}
    if not to.grid.has_floats:
        parts["zero"] = torch.full(scale.shape, to.zero_point, dtype=torch.int64)
    return {name: part.to(tensor.device) for name, part in parts.items()}


def read_back(
    graph: FxGraph, stored: dict[str, FxNode], to: Scaled, *, for_gpu: bool = False
) -> FxNode:
    """A new node that decodes the tensors of ``stored_codes`` to fp32."""
    grid = to.grid
    if states_product(stored["codes"], grid, for_gpu=for_gpu):
        numbers = called(graph, _CAST, stored["codes"], dtype=torch.float32)
        scales = stored["scale"]
        if to.axis is not None:
            scales = called(graph, torch.ops.aten.unsqueeze.default, scales, 1)
        return called(graph, _MUL, numbers, scales)
    dtype: torch.dtype = getattr(torch, grid.dtype.name)
    codes, scale, zero = (stored[name] for name in ("codes", "scale", "zero"))
    if to.axis is None:
        tensor = (codes, to.scale[0], to.zero_point, grid.lowest, grid.highest, dtype)
        return graph.call_function(coded_ops().dequantize_per_tensor.default, tensor)
    channels = (codes, scale, zero, to.axis, grid.lowest, grid.highest, dtype)
    return graph.call_function(coded_ops().dequantize_per_channel.default, channels)


def scales_of_products(module: GraphModule) -> dict[str, str]:
    """Paths of the scales of coded constants, by the names of the FX nodes that read them."""
    return {p.name: str(back.args[1].target) for p, back in _products(module)}


def give_bf16(module: GraphModule) -> None:
    """Let products on codes give bf16 where only casts to bf16 read their results.

    The operands and the bias are cast in place of the result. Inductor fuses these casts into
    the kernel on integers, which then writes half the bytes; a cast of the result would be a
    kernel of its own. Run op by op, the decoded operands are rounded to bf16, too.
    """
    graph = module.graph
    for product, _ in _products(module):
        casts = list(product.users)
        if not casts or any(conversion(c) is not torch.bfloat16 for c in casts):
            continue
        for operand in product.all_input_nodes:
            with graph.inserting_before(product):
                low = graph.call_function(_CAST, (operand,), {"dtype": torch.bfloat16})
            low.meta = {**operand.meta, "val": operand.meta["val"].to(torch.bfloat16)}
            product.replace_input_with(operand, low)
        product.meta["val"] = product.meta["val"].to(torch.bfloat16)
        for cast in casts:
            cast.replace_all_uses_with(product)
            graph.erase_node(cast)


def state_by_axis(module: GraphModule) -> None:
    """Give convolutions of codes their stride, padding and dilation as a number for each axis.

    oneDNN's packed kernels take neither the padding ``valid`` nor one number for both axes:
    with them the whole module would not compile.
    """
    for product, _ in _products(module):
        arguments = named_arguments(product)
        named = product.target is _CONV_PADDING_BY_NAME
        if named and arguments.get("padding", "valid") == "valid":
            arguments["padding"] = [0]
            product.target = _CONV
        if product.target is _CONV:
            stated = {name: list(arguments[name]) for name in _BY_AXIS if name in arguments}
            arguments |= {name: n * 2 if len(n) == 1 else n for name, n in stated.items()}
            operands = tuple(arguments.pop(name) for name in ("input", "weight"))
            product.args, product.kwargs = operands, arguments


def state_rows(module: GraphModule) -> None:
    """Compute linear layers of codes on two axes where their results are read as rows.

    Inductor flattens the operand of a linear layer to a matrix, and reshapes the result back.
    A reshape of the result to rows cancels the second of these, and then no pattern of its
    products on integers matches.
    """
    for product, _ in _products(module):
        whole = product.meta["val"]
        if product.target is not _LINEAR or whole.ndim < 3:
            continue
        flat = whole.flatten(0, -2)
        readers = [r for r in product.users if _reshapes_to(r, flat)]
        if readers and _read_rows(product):
            product.meta["val"] = flat
            for reader in readers:
                reader.replace_all_uses_with(product)
    module.graph.eliminate_dead_code()


def _read_rows(product: FxNode) -> bool:
    """Let ``product`` read its codes as rows, and reshape its result back for its readers.

    Returns False, and changes nothing, where its operand is not decoded from codes.
    """
    steps = [product.all_input_nodes[0]]
    while conversion(steps[-1]):
        steps.append(steps[-1].all_input_nodes[0])
    if steps[-1].target is not coded_ops().dequantize_per_tensor.default:
        return False
    graph, codes = product.graph, steps[-1].all_input_nodes[0]
    with graph.inserting_before(product):
        shape = codes.meta["val"].shape
        axes = [size_of(codes, axis) for axis in range(len(shape) - 1)]
        read = graph.call_function(_RESHAPE, (codes, [-1, shape[-1]]))
        read.meta = {**codes.meta, "val": codes.meta["val"].flatten(0, -2)}
        for step in reversed(steps):
            before = step.all_input_nodes[0]
            read = graph.node_copy(step, {before: read}.__getitem__)
            read.meta["val"] = step.meta["val"].flatten(0, -2)
    product.replace_input_with(steps[0], read)
    with graph.inserting_after(product):
        back = graph.call_function(_RESHAPE, (product, [*axes, -1]))
    back.meta = dict(product.meta)
    product.replace_all_uses_with(back, lambda reader: reader is not back)
    return True


def _reshapes_to(reader: FxNode, like: Any) -> bool:
    """Whether ``reader`` reshapes its operand to the shape of ``like``."""
    if native_name(reader) not in _RESHAPES:
        return False
    return statically_known_true(sym_eq(reader.meta["val"].shape, like.shape))


def size_of(node: FxNode, axis: int) -> FxNode:
    """A new node that computes the size of an axis.

    Sizes that were fixed as the module was captured, too: it runs with others.
    """
    size_node = node.graph.call_function(torch.ops.aten.sym_size.int, (node, axis))
    size_node.meta["val"] = node.meta["val"].shape[axis]
    return size_node


def _products(module: GraphModule) -> list[tuple[FxNode, Any]]:
    """Ops that read constants with a scale for each channel, each with the node that decodes.

    A cast may stand between the two.
    """
    op = coded_ops().dequantize_per_channel.default
    return [
        (product, back)
        for back in module.graph.find_nodes(op="call_function", target=op)
        for user in back.users
        for product in (user.users if conversion(user) else (user,))
    ]
