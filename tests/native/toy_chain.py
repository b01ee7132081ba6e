"""The toy's model: a chain of ops, its graph, its numbers and what a plan makes of it.

``{"ops": [{"name": "first", "op": "matmul", "format": "fp32", "weight": [[1.0]]}, ...]}``: ops
are matmul, relu and cast. It stands for a framework's own library, and for ``frontends``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from finecast.data.deviation import deviation
from finecast.engines.base import Array, Feeds, Session, TensorSpec, ordered_feeds
from finecast.errors import WrongNumbersError
from finecast.graph import ConstantStats, Graph, Node, Value
from finecast.native.artefact import Verified, compare
from finecast.numbers.formats import Format
from finecast.numbers.rounding import convert_constant, round_to
from finecast.planning.plan import Plan

Chain = list[dict[str, Any]]
FORMATS: Final = frozenset({Format.FP32, Format.BF16, Format.FP16})


def graph_of(chain: Chain, digest: str) -> Graph:
    width = len(next(op["weight"] for op in chain if op["op"] == "matmul"))
    values = [Value(id=0, name="x", dtype="fp32", shape=("n", width), is_input=True)]
    nodes: list[Node] = []

    def new(name: str, op: Mapping[str, Any], shape: tuple[int | str, ...]) -> Value:
        value = Value(id=len(values), name=name, dtype=op["format"], shape=shape)
        values.append(value)
        return value

    for i, op in enumerate(chain):
        inputs = [values[-1].id]
        if op["op"] == "matmul":
            w = np.array(op["weight"], np.float32)
            width, stats = w.shape[1], ConstantStats(size=w.size, read=lambda w=w: w)
            inputs.append(new(f"{op['name']}.weight", op, w.shape).id)
            values[-1] = replace(values[-1], constant=stats)
        for index in inputs:
            values[index] = replace(values[index], uses=(i,))
        name = "y" if op is chain[-1] else f"{op['name']}.y"
        result = new(name, op, ("n", width)).id
        values[result] = replace(values[result], producer=i, is_output=op is chain[-1])
        fmt = None if op["op"] == "cast" else Format.parse(op["format"])
        node = Node(
            id=i,
            name=op["name"],
            op=op["op"],
            native=f"toy::{op['op']}",
            inputs=tuple(inputs),
            outputs=(result,),
            follows_in=(fmt is not None,) * len(inputs),
            follows_out=(fmt is not None,),
            format=fmt,
            admits=FORMATS,
        )
        nodes.append(node)
    return Graph(nodes=tuple(nodes), values=tuple(values), digest=digest)


def time_s(op: Mapping[str, Any]) -> float:
    """1 ms, in a low format a quarter of it; of a cast 50 us."""
    return 5e-5 if op["op"] == "cast" else 1e-3 if op["format"] == "fp32" else 2.5e-4


@dataclass(frozen=True, kw_only=True)
class ToySession(Session):
    chain: Chain
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]

    @classmethod
    def of(cls, chain: Chain) -> ToySession:
        graph = graph_of(chain, "")
        inputs, outputs = (
            [TensorSpec(name=v.name, dtype=v.dtype, shape=v.shape) for v in ports]
            for ports in (graph.inputs, graph.outputs)
        )
        return cls(chain=chain, inputs=inputs, outputs=outputs)

    def run(self, feeds: Feeds) -> dict[str, Array]:
        x = ordered_feeds(feeds, self.inputs)[0].astype(np.float32)
        for op in self.chain:
            if op["op"] == "matmul":
                x = x @ np.array(op["weight"], np.float32)
            x = (
                np.maximum(x, 0)
                if op["op"] == "relu"
                else round_to(x, Format.parse(op["format"]))
            )
        return {self.outputs[0].name: x}


def lowered(chain: Chain, plan: Plan) -> Chain:
    """The chain of a plan: a cast where the type changes, and one back to fp32 at the end."""
    found: Chain = []
    stored = "fp32"

    def cast(to: str, before: str) -> None:
        if to != stored:
            found.append({"name": f"cast_{before}", "op": "cast", "format": to})

    for op in chain:
        if op["op"] == "cast":
            found.append(op)
            stored = op["format"]
            continue
        fmt = plan.formats.get(op["name"], Format.parse(op["format"]))
        cast(fmt.label, op["name"])
        new = {**op, "format": fmt.label}
        if "weight" in op:
            weight = convert_constant(np.array(op["weight"], np.float32), fmt)
            new["weight"] = weight.astype(np.float32).tolist()
        found.append(new)
        stored = fmt.label
    cast("fp32", "end")
    return found


def verify(before: Chain, after: Chain, feeds: Feeds) -> Verified:
    wanted, got = (ToySession.of(chain).run(feeds) for chain in (before, after))
    if any(deviation(got[name], array).nonfinite for name, array in wanted.items()):
        raise WrongNumbersError("an output has NaN or Inf where fp32 has none")
    return compare("toy", got, wanted)
