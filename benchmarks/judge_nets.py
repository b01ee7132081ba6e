"""Nets of 10 to 14 ops, of which every assignment of formats is tried: the best one is known.

A net is a seeded drawing of ONNX ops: products of several sizes, activations, sums with
earlier values, and cancellations, where fp16 loses most digits. What each op costs in fp32 and
fp16, and what a cast costs, is stated by a made-up device. Law: the error of an assignment is
that of numpy's own fp16 rounding between ops that ONNX Runtime computes one at a time in fp32,
and its time a sum of stated times; nothing of finecast's search, emulator or planner takes
part.

The order in which products are summed is part of what an accuracy is: where results nearly
cancel, it alone moves an SNR by some dB. ONNX Runtime's is that of the emulator, so that both
speak of the same accuracy. With ``reverse`` the terms come in reverse order, as on another
device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array: TypeAlias = NDArray[np.float32]

ROWS: Final = 32
_WIDTHS: Final = (32, 64, 96, 128)
# Seconds that an op takes beside its arithmetic; rates of products, and of all other ops.
OP_S: Final = 0.5e-6
PRODUCT_TFLOPS: Final = {"fp32": 0.05, "fp16": 0.15}
VECTOR_TFLOPS: Final = {"fp32": 0.004, "fp16": 0.008}
# Operations that one number takes on the vector unit: an exponential is a polynomial.
_OPERATIONS: Final = {"Tanh": 16.0}
_OPERANDS: Final = ("a", "b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op: its kind, the values that it reads (0 is the input), a weight if it has one."""

    kind: str
    reads: tuple[int, ...]
    weight: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeNet:
    """A net, its data, and what a cast takes on its device. Op ``i`` gives value ``i + 1``."""

    seed: int
    ops: tuple[Op, ...]
    x: Array
    cast_s: float

    @property
    def widths(self) -> list[int]:
        """The columns of each value."""
        found = [self.x.shape[1]]
        for op in self.ops:
            found.append(found[op.reads[0]] if op.weight is None else op.weight.shape[1])
        return found

    def names(self) -> list[str]:
        """The names of the ops in the ONNX model, in order."""
        return [f"op{i}_{op.kind.lower()}" for i, op in enumerate(self.ops)]

    def model(self) -> onnx.ModelProto:
        """The net in ONNX, with fp32 input and output."""
        widths, nodes, weights = self.widths, list[Any](), list[Any]()
        last = len(self.ops)
        for i, (op, name) in enumerate(zip(self.ops, self.names(), strict=True)):
            reads = [_value(r, last) for r in op.reads]
            if op.weight is not None:
                weights.append(numpy_helper.from_array(op.weight, f"w{i}"))
                reads.append(f"w{i}")
            nodes.append(helper.make_node(op.kind, reads, [_value(i + 1, last)], name=name))
        ports = [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, [ROWS, w])
            for n, w in (("x", widths[0]), ("y", widths[-1]))
        ]
        graph = helper.make_graph(nodes, f"judge{self.seed}", ports[:1], ports[1:], weights)
        opset = helper.make_opsetid("", 17)
        return helper.make_model(graph, opset_imports=[opset], ir_version=9)

    def run(self, low: Sequence[bool], *, reverse: bool = False) -> Array:
        """The output if the ops of ``low`` compute in fp16."""
        values = [self.x]
        for op, lowered in zip(self.ops, low, strict=True):
            operands = [values[r] for r in op.reads]
            values.append(computed(op, operands, low=lowered, reverse=reverse))
        return values[-1]

    def snrs_db(self, *, reverse: bool = False) -> NDArray[np.float64]:
        """The SNR of all assignments; bit ``i`` of an index says that op ``i`` is in fp16.

        Assignments that agree in the first ops share their values: 2^(n + 1) ops run in all.
        """
        exact = self.run([False] * len(self.ops), reverse=reverse).astype(np.float64)
        power = float(np.square(exact).sum())
        found = np.empty(1 << len(self.ops))
        for mask, output in self._outputs([self.x], 0, reverse=reverse):
            error = float(np.square(output.astype(np.float64) - exact).sum())
            if not np.isfinite(error):
                found[mask] = -np.inf
            else:
                found[mask] = np.inf if error == 0.0 else 10 * np.log10(power / error)
        return found

    def _outputs(
        self, values: list[Array], mask: int, *, reverse: bool
    ) -> Iterator[tuple[int, Array]]:
        depth = len(values) - 1
        if depth == len(self.ops):
            yield mask, values[-1]
            return
        op = self.ops[depth]
        operands = [values[r] for r in op.reads]
        for lowered in (False, True):
            result = computed(op, operands, low=lowered, reverse=reverse)
            masked = mask | lowered << depth
            yield from self._outputs([*values, result], masked, reverse=reverse)

    def times_s(self) -> NDArray[np.float64]:
        """The stated time of all assignments: ops, and one cast a value and format read."""
        count, masks = len(self.ops), np.arange(1 << len(self.ops))
        low = [(masks >> i) & 1 == 1 for i in range(count)]
        never = np.zeros(len(masks), dtype=bool)
        total = np.zeros(len(masks))
        for i in range(count):
            total += np.where(low[i], self.op_s(i, "fp16"), self.op_s(i, "fp32"))
        for value in range(count + 1):
            readers = [low[i] for i, op in enumerate(self.ops) if value in op.reads]
            written = low[value - 1] if value else never
            # The model's output is read in fp32.
            wide = [~r for r in readers] + ([~never] if value == count else [])
            narrow = np.logical_or.reduce([never, *readers])
            cast = (written & np.logical_or.reduce([never, *wide])) | (~written & narrow)
            total += np.where(cast, self.cast_s, 0.0)
        return total

    def op_s(self, index: int, fmt: str) -> float:
        """The stated time of one op in a format."""
        op, widths = self.ops[index], self.widths
        if op.weight is not None:
            rate, work = PRODUCT_TFLOPS[fmt], 2.0 * ROWS * op.weight.size
        else:
            rate = VECTOR_TFLOPS[fmt]
            work = _OPERATIONS.get(op.kind, 1.0) * ROWS * widths[index + 1]
        return OP_S + work / (rate * 1e12)


def _value(index: int, last: int) -> str:
    return "x" if index == 0 else "y" if index == last else f"v{index}"


def rounded(x: Array) -> Array:
    """``x`` rounded to fp16, in fp32."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def computed(
    op: Op,
    operands: list[Array],
    *,
    low: bool = False,
    low_weight: bool = False,
    reverse: bool = False,
) -> Array:
    """An op in fp32, or with its operands and its result rounded to fp16 (sums in fp32).

    With ``low_weight`` its weight alone is rounded.
    """
    weight = op.weight if op.weight is None or not low_weight else rounded(op.weight)
    operands = [*operands, *([] if weight is None else [weight])]
    if low:
        operands = [rounded(one) for one in operands]
    if op.kind == "MatMul" and reverse:
        x, weight = operands
        operands = [np.ascontiguousarray(x[:, ::-1]), np.ascontiguousarray(weight[::-1])]
    session = _session(op.kind, len(operands))
    found = session.run(None, dict(zip(_OPERANDS, operands, strict=False)))
    result = np.asarray(found[0], np.float32)
    return rounded(result) if low else result


@cache
def _session(kind: str, count: int) -> onnxruntime.InferenceSession:
    """A session of one op."""
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None])
        for name in (*_OPERANDS[:count], "y")
    ]
    node = helper.make_node(kind, _OPERANDS[:count], ["y"])
    graph = helper.make_graph([node], kind, ports[:-1], ports[-1:])
    opset = helper.make_opsetid("", 17)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def draw(seed: int) -> JudgeNet:
    """The net of a seed: 10 to 14 ops, one or two of them far more sensitive than the rest."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(10, 15))
    width = int(rng.choice(_WIDTHS))
    x = rng.standard_normal((ROWS, width)).astype(np.float32)
    ops: list[Op] = []
    widths = [width]
    while len(ops) < count:
        last, room = len(ops), count - len(ops)
        alike = [v for v in range(last) if widths[v] == widths[last]]
        if room >= 3 and rng.random() < 0.2:  # two products that nearly cancel
            weight = _weight(rng, widths[last], int(rng.choice(_WIDTHS)))
            near = weight * (1 + 0.03 * rng.standard_normal(weight.shape))
            ops += [
                Op(kind="MatMul", reads=(last,), weight=weight),
                Op(kind="MatMul", reads=(last,), weight=near.astype(np.float32)),
                Op(kind="Sub", reads=(last + 1, last + 2)),
            ]
            widths += [weight.shape[1]] * 3
        elif alike and rng.random() < 0.3:
            kind = str(rng.choice(["Add", "Mul"]))
            ops.append(Op(kind=kind, reads=(last, int(rng.choice(alike)))))
            widths.append(widths[last])
        elif last and ops[-1].kind == "MatMul" and rng.random() < 0.5:
            ops.append(Op(kind=str(rng.choice(["Relu", "Tanh"])), reads=(last,)))
            widths.append(widths[last])
        else:
            weight = _weight(rng, widths[last], int(rng.choice(_WIDTHS)))
            ops.append(Op(kind="MatMul", reads=(last,), weight=weight))
            widths.append(weight.shape[1])
    cast_s = float(10 ** rng.uniform(-7.0, -5.3))
    return JudgeNet(seed=seed, ops=tuple(ops), x=x, cast_s=cast_s)


def _weight(rng: np.random.Generator, rows: int, columns: int) -> Array:
    weight = rng.standard_normal((rows, columns)) / np.sqrt(rows)
    if rng.random() < 0.2:
        weight[:, int(rng.integers(columns))] *= 30.0  # an outlier channel
    return weight.astype(np.float32)
