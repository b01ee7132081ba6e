"""Restates a captured module: batch norms, products and views; superfluous casts go.

Batch norms of inference are folded into the convolutions before them. Law: the folded graph
computes the same function in exact arithmetic. Folded weights are computed in fp64. A plan
then rounds the pair once, and eager PyTorch runs one op where there were two.

What ops give of weights alone, such as a weight norm, is a weight: it is computed once.

Products with constant matrices are restated as linear layers. Law: the results stay the same
bit for bit. A linear layer multiplies by transposed weights; it gets a transposed view of the
same memory.

Ops that depend on the strides of values, which casts and decompositions change, are restated
as ops that do not.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.node import map_arg
from torch.nn.utils.fusion import fuse_conv_bn_weights

from finecast.frontends.folding import WIDE, ConstantFolding
from finecast.frontends.torch.aten import (
    DTYPES,
    VIEWS,
    named_arguments,
    native_name,
    type_label,
)
from finecast.frontends.torch.reader import attribute, forget_unused, register, written
from finecast.numbers.formats import Format
from finecast.ops import lookup

_CONVS = frozenset({"aten::conv1d", "aten::conv2d", "aten::conv3d"})
_NORM = "aten::_native_batch_norm_legit_no_training"


def fold_batch_norms(module: GraphModule) -> int:
    """Fold all batch norms that can be; returns how many were."""
    folded = 0
    for norm in list(module.graph.nodes):
        if native_name(norm) == _NORM and _foldable(norm):
            _fold(module, norm, folded)
            folded += 1
    if folded:
        module.graph.eliminate_dead_code()
        module.delete_all_unused_submodules()
        forget_unused(module)
        module.recompile()
    return folded


def _foldable(norm: FxNode) -> bool:
    conv = norm.args[0]
    if not isinstance(conv, FxNode) or native_name(conv) not in _CONVS or len(conv.users) > 1:
        return False
    constants = [a for a in (*norm.args[1:5], *conv.args[1:3]) if a is not None]
    return all(isinstance(c, FxNode) and c.op == "get_attr" for c in constants) and all(
        u.target is operator.getitem and u.args[1] == 0 for u in norm.users
    )


def _fold(module: GraphModule, norm: FxNode, number: int) -> None:
    conv = norm.args[0]
    assert isinstance(conv, FxNode)
    weight_node = conv.args[1]
    assert isinstance(weight_node, FxNode)
    weight, bias = _folded(module, conv, norm)
    fake = weight_node.meta["val"]
    new: list[FxNode] = []
    for part, tensor, like in (
        ("weight", weight, fake),
        ("bias", bias, fake.new_empty(bias.shape)),
    ):
        name = f"_folded_{number}_{part}"
        parameter = torch.nn.Parameter(tensor.to(fake.dtype), requires_grad=False)
        module.register_parameter(name, parameter)
        with module.graph.inserting_before(conv):
            new.append(module.graph.get_attr(name))
        new[-1].meta["val"] = like
    conv.args = (conv.args[0], *new, *conv.args[3:])
    for user in list(norm.users):
        user.replace_all_uses_with(conv)


def _folded(
    module: GraphModule, conv: FxNode, norm: FxNode
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and bias, in fp64, of the convolution that ``conv`` and ``norm`` become."""

    def read(arg: Any) -> torch.Tensor | None:
        return None if arg is None else attribute(module, str(arg.target)).detach().double()

    weight = read(conv.args[1])
    bias = read(conv.args[2]) if len(conv.args) > 2 else None
    gamma, beta, mean, variance = map(read, norm.args[1:5])
    eps: Any = norm.args[6]
    assert weight is not None
    assert mean is not None
    assert variance is not None
    return fuse_conv_bn_weights(weight, bias, mean, variance, eps, gamma, beta)


def fold_constants(module: GraphModule) -> None:
    """Compute what ops give of weights alone, such as a weight norm or a transposed table.

    Views share the memory of the weights that they are of, so a tied table is held once. What
    nothing reads any more is held no longer.
    """
    folding: ConstantFolding[FxNode] = ConstantFolding()
    changing, held = written(module), set[FxNode]()
    for node in list(module.graph.nodes):
        size = _fixed_bytes(node)
        if size is None or node in changing:
            continue
        label = type_label(node.meta["val"])
        if node.op == "get_attr":
            folding.add(node, size, label)
        elif _gives_floats(node, label):
            info = lookup(native_name(node))
            if folding.fold(info, node.all_input_nodes, {node: (size, label)}):
                sources = node.all_input_nodes
                constant = _computed(module, node, len(held))
                folding.hold(constant, node)
                held.add(constant)
                module.graph.erase_node(node)
                for unread in (s for s in sources if s in held and not s.users):
                    module.graph.erase_node(unread)
                    delattr(module, str(unread.target))
    if held:
        module.graph.eliminate_dead_code()
        forget_unused(module)
        module.recompile()


def _fixed_bytes(node: FxNode) -> int | None:
    """Bytes of a node's tensor; None if it gives another thing, or has free sizes."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
        return None
    fixed = not any(isinstance(size, torch.SymInt) for size in val.shape)
    return val.numel() * val.element_size() if fixed else None


def _gives_floats(node: FxNode, label: str) -> bool:
    """Whether a call only gives wide floats, and the module does not return these."""
    inner = isinstance(node.target, OpOverload) and not native_name(node).endswith("_")
    return inner and label in WIDE and all(user.op != "output" for user in node.users)


def _computed(module: GraphModule, node: FxNode, number: int) -> FxNode:
    """An attribute of the module in the place of ``node``, which reads attributes alone."""

    def held(source: FxNode) -> torch.Tensor:
        return attribute(module, str(source.target)).detach()

    compute: Any = node.target
    with torch.no_grad():
        args, kwargs = map_arg(node.args, held), map_arg(node.kwargs, held)
        result: torch.Tensor = compute(*args, **kwargs)
    name = register(module, f"_computed_{number}", result)
    with module.graph.inserting_before(node):
        constant = module.graph.get_attr(name)
    constant.meta = dict(node.meta)
    node.replace_all_uses_with(constant)
    return constant


_LINEAR: Final = torch.ops.aten.linear.default
# The argument names of each product: operand, weights, and the bias that is added.
_PRODUCTS: Final[Mapping[Any, tuple[str, str, str]]] = {
    torch.ops.aten.addmm.default: ("mat1", "mat2", "self"),
    torch.ops.aten.mm.default: ("self", "mat2", ""),
    torch.ops.aten.matmul.default: ("self", "other", ""),
}
_FACTORS: Final = ("alpha", "beta")


def state_linear_layers(module: GraphModule) -> None:
    """Restate them in place; in transformers' GPT-2 a linear layer is an ``addmm``."""
    changing = written(module)
    transposed: dict[int, str] = {}  # names of transposed tensors, by the tensor's id
    for node in list(module.graph.nodes):
        operands = _operands(node)
        if operands is None or operands[1] in changing:
            continue
        value, weights, added = operands
        tensor = attribute(module, str(weights.target))
        if id(tensor) not in transposed:
            transposed[id(tensor)] = _transposed(module, str(weights.target), tensor)
        with module.graph.inserting_after(weights):
            turned = module.graph.get_attr(transposed[id(tensor)])
        turned.meta = {**weights.meta, "val": weights.meta["val"].t()}
        node.target, node.kwargs = _LINEAR, {}
        node.args = (value, turned) if added is None else (value, turned, added)
    if not transposed:
        return
    module.graph.eliminate_dead_code()
    forget_unused(module)
    module.recompile()


def _operands(node: FxNode) -> tuple[FxNode, FxNode, FxNode | None] | None:
    """Operand, weights and bias of a product with a constant matrix; None for other nodes."""
    names = _PRODUCTS.get(node.target) if node.op == "call_function" else None
    if names is None:
        return None
    arguments = named_arguments(node)
    value, weights, added = (arguments.get(name) for name in names)
    if not _is_float(value) or value.op == "get_attr":
        return None
    if not _is_float(weights) or weights.op != "get_attr" or weights.meta["val"].ndim != 2:
        return None
    fits = added is None or added.meta["val"].shape == weights.meta["val"].shape[1:]
    plain = all(arguments.get(factor, 1) == 1 for factor in _FACTORS)
    return (value, weights, added) if fits and plain else None


def _is_float(arg: object) -> TypeGuard[FxNode]:
    return isinstance(arg, FxNode) and arg.meta["val"].dtype.is_floating_point


def _transposed(module: GraphModule, path: str, tensor: torch.Tensor) -> str:
    """Add a transposed view of ``tensor``, which is at ``path``; returns its name."""
    turned = tensor.detach().t()
    if isinstance(tensor, torch.nn.Parameter):
        turned = torch.nn.Parameter(turned, requires_grad=tensor.requires_grad)
    return register(module, f"{path}_transposed", turned)


_VIEW_OPS: Final = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def free_of_strides(module: GraphModule) -> None:
    """Replace views by reshapes, which copy where strides no longer allow a view.

    A cast removes gaps from a layout, a cast that is dropped no longer does, and a
    decomposition may lay out its result otherwise than the op's kernel. Where strides are as
    they were when the graph was captured, nothing is copied.
    """
    for view in _VIEW_OPS:
        for node in module.graph.find_nodes(op="call_function", target=view):
            node.target = torch.ops.aten.reshape.default
    module.recompile()


def read_whole_memory(module: GraphModule) -> None:
    """Let ``as_strided`` read the tensor that its argument is a view of, at the same offset.

    Its sizes and strides are positions in memory, gaps of the view among them. A cast between
    the view and ``as_strided`` would remove the gaps.
    """
    strided = torch.ops.aten.as_strided.default
    for node in module.graph.find_nodes(op="call_function", target=strided):
        view, size, stride, *offset = node.args
        start = offset[0] if offset else view.meta["val"].storage_offset()
        if isinstance(start, int):
            node.args = (_viewed(view), size, stride, start)
    module.recompile()


def _viewed(node: FxNode) -> FxNode:
    """What ``node`` is a view of, through any number of views; or ``node`` itself."""
    while node.op == "call_function" and native_name(node) in VIEWS:
        source = node.args[0]
        if not isinstance(source, FxNode):
            break
        node = source
    return node


# ----------------------------------- casts that a plan's and the module's own make superfluous
#
# Laws: a value has at most one cast to a type, and none to the type that it has; a cast of a
# widened value reads the value before it was widened. No number changes, as widening is exact.

_FORMATS: Final[dict[torch.dtype | None, Format]] = {
    dtype: fmt for fmt, dtype in DTYPES.items()
}
_INPUTS = frozenset({"placeholder", "get_attr"})


def simplify_casts(module: GraphModule) -> None:
    """Merge and drop conversions in place; ``meta["val"]`` of every node has its type."""
    known: dict[tuple[FxNode, torch.dtype], FxNode] = {}
    for node in list(module.graph.nodes):
        dtype = conversion(node)
        if dtype is None:
            continue
        source = _narrowest(node.all_input_nodes[0])
        if source is not node.all_input_nodes[0]:
            node.replace_input_with(node.all_input_nodes[0], source)
        same = source if _dtype(source) is dtype else known.setdefault((source, dtype), node)
        if same is not node and not _leaks(same, node):
            node.replace_all_uses_with(same)
    module.graph.eliminate_dead_code()


def conversion(node: FxNode) -> torch.dtype | None:
    """The float type that a plain conversion gives; None for any other node."""
    native = native_name(node)
    if native == "prims::convert_element_type":
        dtype = node.args[1]
    elif native == "aten::_to_copy" and {k for k, v in node.kwargs.items() if v} == {"dtype"}:
        dtype = node.kwargs["dtype"]
    else:
        return None
    return dtype if isinstance(dtype, torch.dtype) and _dtype(node) in _FORMATS else None


def _narrowest(source: FxNode) -> FxNode:
    """The value that ``source`` was widened from, through all casts; or ``source`` itself."""
    while (dtype := conversion(source)) is not None:
        before = source.all_input_nodes[0]
        wide, narrow = _FORMATS.get(dtype), _FORMATS.get(_dtype(before))
        if wide is None or narrow is None or not wide.holds(narrow):
            break
        source = before
    return source


def _leaks(source: FxNode, cast: FxNode) -> bool:
    """Whether the model would give out the caller's memory without ``cast``, which copies.

    It also is kept if the graph writes to ``source``, an input or attribute.
    """
    if source.op not in _INPUTS:
        return False
    written = any(native_name(u) == "aten::copy_" for u in source.users)
    return written or any(u.op == "output" for u in cast.users)


def _dtype(node: FxNode) -> torch.dtype | None:
    val = node.meta.get("val")
    return val.dtype if isinstance(val, torch.Tensor) else None
