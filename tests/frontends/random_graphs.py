"""Random valid models: bodies, ties, several consumers, mixed types, dead ends, odd names.

All ops are such that computing in fp32 and rounding once is what computing in the low format
gives (for +, -, * by 24 >= 2 p + 2, Figueroa 1995), so that a plan can be emulated exactly.
Every float value has the shape [2, 3].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SHAPE: Final = (2, 3)
UNARY: Final = (
    "Relu",
    "Neg",
    "Abs",
    "Identity",
    "Floor",
    "Transpose",
    "Reshape",
    "Clip",
    "Cast",
)
BINARY: Final = ("Add", "Sub", "Mul", "Max", "Min", "Where", "Concat")
CONTROL: Final = ("If", "Loop", "Scan")
_DEPTH: Final = 2


@dataclass
class _Scope:
    """One graph under construction: its nodes, and the values that can be read in it."""

    values: list[str]
    depth: int = 0
    nodes: list[onnx.NodeProto] = field(default_factory=list[onnx.NodeProto])
    weights: list[onnx.TensorProto] = field(default_factory=list[onnx.TensorProto])
    made: list[str] = field(default_factory=list[str])


class Generator:
    """Makes one model from a source of random choices."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.count = 0

    def model(self) -> onnx.ModelProto:
        """A valid model; inputs ``x0``.. (fp32) and ``c`` (a bool)."""
        inputs = [f"x{i}" for i in range(self.random.randint(1, 3))]
        scope = _Scope(values=list(inputs))
        self._constants(scope)
        self.steps(scope, self.random.randint(1, 10))
        made = scope.made or inputs
        outputs = list(dict.fromkeys(self.random.choices(made, k=self.random.randint(1, 3))))
        if self.random.random() < 0.1:
            outputs.append(inputs[0])
        ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, SHAPE) for n in inputs]
        ports.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
        ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, SHAPE) for n in outputs]
        graph = helper.make_graph(scope.nodes, "g", ports, ends, scope.weights)
        ids = [helper.make_opsetid("", 22)]
        return helper.make_model(graph, opset_imports=ids, ir_version=10)

    def name(self) -> str:
        """A fresh name, sometimes just digits, sometimes one that a cast would take."""
        self.count += 1
        style = self.random.choice(("v{}", "{}", "v{}_fp16", "a/b.{}"))
        return style.format(self.count)

    def steps(self, scope: _Scope, count: int) -> None:
        """Append ``count`` random steps."""
        for _ in range(count):
            kind = self.random.random()
            if kind < 0.4:
                self._unary(scope)
            elif kind < 0.8 or scope.depth >= _DEPTH:
                self._binary(scope)
            else:
                getattr(self, f"_{self.random.choice(CONTROL).lower()}")(scope)

    def _constants(self, scope: _Scope) -> None:
        for _ in range(self.random.randint(0, 2)):
            scope.values.append(self._weight(scope))

    def _weight(self, scope: _Scope, shape: tuple[int, ...] = SHAPE) -> str:
        rng = np.random.default_rng(self.random.randrange(1 << 30))
        array = rng.standard_normal(shape).astype(np.float32)
        name = self.name()
        if self.random.random() < 0.5:
            scope.weights.append(numpy_helper.from_array(array, name))
        else:
            value = numpy_helper.from_array(array, name)
            scope.nodes.append(helper.make_node("Constant", [], [name], value=value))
        return name

    def _integers(self, scope: _Scope, numbers: list[int]) -> str:
        name = self.name()
        scope.weights.append(numpy_helper.from_array(np.array(numbers, np.int64), name))
        return name

    def _add(
        self, scope: _Scope, op: str, inputs: list[str], outputs: int = 1, **attributes: Any
    ) -> list[str]:
        names = [self.name() for _ in range(outputs)]
        node_name = self.random.choice(("", op, self.name()))
        scope.nodes.append(helper.make_node(op, inputs, names, name=node_name, **attributes))
        return names

    def _keep(self, scope: _Scope, name: str) -> None:
        scope.values.append(name)
        scope.made.append(name)

    def _pick(self, scope: _Scope) -> str:
        return self.random.choice(scope.values)

    def _unary(self, scope: _Scope) -> None:
        op, source = self.random.choice(UNARY), self._pick(scope)
        if op == "Cast":
            kind = self.random.choice(
                (
                    TensorProto.FLOAT16,
                    TensorProto.BFLOAT16,
                    TensorProto.DOUBLE,
                    TensorProto.FLOAT,
                )
            )
            (middle,) = self._add(scope, "Cast", [source], to=kind)
            if self.random.random() < 0.5:
                (middle,) = self._add(scope, "Relu", [middle])
            (result,) = self._add(scope, "Cast", [middle], to=TensorProto.FLOAT)
        elif op == "Transpose":
            (middle,) = self._add(scope, op, [source], perm=[1, 0])
            (result,) = self._add(scope, op, [middle], perm=[1, 0])
        elif op == "Reshape":
            (middle,) = self._add(scope, op, [source, self._integers(scope, [6])])
            (result,) = self._add(scope, op, [middle, self._integers(scope, list(SHAPE))])
        elif op == "Clip":
            (result,) = self._add(scope, op, [source, "", self._weight(scope, ())])
        else:
            (result,) = self._add(scope, op, [source])
        self._keep(scope, result)

    def _binary(self, scope: _Scope) -> None:
        op, a, b = self.random.choice(BINARY), self._pick(scope), self._pick(scope)
        if op == "Where":
            (chosen,) = self._add(scope, "Less", [a, self._pick(scope)])
            (result,) = self._add(scope, op, [chosen, a, b])
        elif op == "Concat":
            (both,) = self._add(scope, op, [a, b], axis=0)
            parts = self._add(scope, "Split", [both], 2, axis=0, num_outputs=2)
            result = self.random.choice(parts)
        else:
            (result,) = self._add(scope, op, [a, b])
        self._keep(scope, result)

    def _body(self, scope: _Scope, extra: list[str]) -> _Scope:
        inner = _Scope(values=[*scope.values, *extra], depth=scope.depth + 1)
        self._constants(inner)
        self.steps(inner, self.random.randint(1, 4))
        return inner

    def _end(self, inner: _Scope) -> str:
        """A value made in the body: ONNX lets a body give back nothing else."""
        if inner.made:
            return self.random.choice(inner.made)
        (name,) = self._add(inner, "Identity", [self._pick(inner)])
        return name

    def _graph(
        self,
        inner: _Scope,
        inputs: list[onnx.ValueInfoProto],
        outputs: list[onnx.ValueInfoProto],
    ) -> onnx.GraphProto:
        return helper.make_graph(inner.nodes, self.name(), inputs, outputs, inner.weights)

    def _if(self, scope: _Scope) -> None:
        count = self.random.randint(1, 2)
        bodies: list[onnx.GraphProto] = []
        for _ in range(2):
            inner = self._body(scope, [])
            ends: list[str] = []
            while len(ends) < count:
                end = self._end(inner)
                if end in ends:
                    (end,) = self._add(inner, "Identity", [end])
                ends.append(end)
            bodies.append(self._graph(inner, [], [_info(e) for e in ends]))
        results = self._add(
            scope, "If", ["c"], count, then_branch=bodies[0], else_branch=bodies[1]
        )
        for result in results:
            self._keep(scope, result)

    def _loop(self, scope: _Scope) -> None:
        turn, go, state = self.name(), self.name(), self.name()
        inner = self._body(scope, [state])
        (again,) = self._add(inner, "Identity", [go])
        end = self._end(inner)
        # onnx.reference concatenates what ONNX stacks; of vectors both give the same.
        (shown,) = self._add(
            inner, "Gather", [self._pick(inner), self._scalar(inner, 0)], axis=0
        )
        body = self._graph(
            inner,
            [
                _info(turn, TensorProto.INT64, ()),
                _info(go, TensorProto.BOOL, ()),
                _info(state),
            ],
            [_info(again, TensorProto.BOOL, ()), _info(end), _info(shown, shape=(3,))],
        )
        trips = self._integers(scope, [self.random.randint(2, 3)])
        yes = self.name()
        scope.weights.append(numpy_helper.from_array(np.array(True), yes))
        result, stacked = self._add(
            scope, "Loop", [trips, yes, self._pick(scope)], 2, body=body
        )
        (first,) = self._add(scope, "Gather", [stacked, self._integers(scope, [0, 1])], axis=0)
        self._keep(scope, result)
        self._keep(scope, first)

    def _scalar(self, scope: _Scope, number: int) -> str:
        name = self.name()
        scope.weights.append(numpy_helper.from_array(np.array(number, np.int64), name))
        return name

    def _scan(self, scope: _Scope) -> None:
        state, row = self.name(), self.name()
        inner = _Scope(values=[state, row], depth=_DEPTH)
        (total,) = self._add(inner, "Add", [state, row])
        (shown,) = self._add(inner, self.random.choice(("Relu", "Neg")), [total])
        body = self._graph(
            inner,
            [_info(state, shape=(3,)), _info(row, shape=(3,))],
            [_info(total, shape=(3,)), _info(shown, shape=(3,))],
        )
        start = self._weight(scope, (3,))
        _, result = self._add(
            scope, "Scan", [start, self._pick(scope)], 2, num_scan_inputs=1, body=body
        )
        self._keep(scope, result)


def _info(
    name: str, kind: int = TensorProto.FLOAT, shape: tuple[int, ...] = SHAPE
) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)
