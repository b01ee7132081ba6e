"""Verification runs at the lengths where a model's tables of positions end."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from finecast import api
from finecast.data.sizes import affordable, length_limits
from finecast.errors import WrongNumbersError
from finecast.frontends import onnx as frontend
from finecast.rules.policy import Policy, Scope
from tests.frontends.tools import parse

# It rounds whatever a model stores low; engines may keep more digits between their kernels.
ROUNDS = "emulator:sm80"
WIDTH = 4
LENGTH = 512

HEAD = f"net (float[B,N,{WIDTH}] x) => (float[B,N,{WIDTH}] y) "
SIZE = "[shape] s = Shape(x)\n [length] n = Gather<axis = 0>(s, one)\n"
# How exporters take the rows of the positions: a table sliced, a range, a sliced range of
# indices, and positions that start at 2.
SLICED = SIZE + "[ends] e = Unsqueeze(n, zeros)\n [rows] p = Slice(table, zeros, e, zeros)"
RANGED = SIZE + "[steps] r = Range(zero, n, one)\n [rows] p = Gather<axis = 0>(table, r)"
INDEXED = (
    SIZE
    + "[ends] e = Unsqueeze(n, zeros)\n [cut] i = Slice(indices, zeros, e, ones)\n"
    + "[both] b = Shape<start = 0, end = 2>(x)\n [wide] w = Expand(i, b)\n"
    + "[rows] p = Gather<axis = 0>(table, w)"
)
OFFSET = (
    SIZE
    + "[steps] r = Range(zero, n, one)\n [later] q = Add(r, two)\n"
    + "[rows] p = Gather<axis = 0>(table, q)"
)
WAYS = {"sliced": SLICED, "ranged": RANGED, "indexed": INDEXED, "offset": OFFSET}


def net(body: str, table: np.ndarray) -> onnx.ModelProto:
    double = "[square] t = Mul(p, p)\n [root] h = Sqrt(t)\n [sum] y = Add(x, h)"
    model = parse(f"{HEAD} {{ {body}\n {double} }}", opset=17)
    weights = {
        "table": table.astype(np.float32),
        "indices": np.arange(LENGTH)[None],
        "zero": np.int64(0),
        "one": np.int64(1),
        "two": np.int64(2),
        "zeros": np.array([0]),
        "ones": np.array([1]),
    }
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(a), n)
        for n, a in weights.items()
        if n in body + double
    )
    return model


def table(last: float) -> np.ndarray:
    """Positions of which only those far from the first are large: as fp16 holds them."""
    rows = np.ones((LENGTH, WIDTH))
    rows[LENGTH - 20 :] = last
    return rows


@pytest.mark.parametrize("way", WAYS)
def test_the_limit_is_where_the_table_ends(way: str) -> None:
    file = frontend.from_model(net(WAYS[way], table(1)))
    graph = frontend.prepare(file, Policy(scope=Scope.NONE)).graph
    assert length_limits(graph) == {"N": LENGTH}


@pytest.mark.parametrize("way", WAYS)
def test_what_breaks_near_the_limit_alone_is_refused(way: str) -> None:
    """Each number is one of fp16; their squares are not where the table ends."""
    sound, broken = net(WAYS[way], table(2)), net(WAYS[way], table(400))
    done = api.convert(sound, policy="all:fp16", engine=ROUNDS).verified
    assert done.sizes == {"B": 1, "N": LENGTH - (2 if way == "offset" else 0)}
    with pytest.raises(WrongNumbersError, match="NaN or Inf where fp32 has none"):
        api.convert(broken, policy="all:fp16", engine=ROUNDS)


def test_a_length_that_is_asked_for_is_taken() -> None:
    """It is said which: the model that breaks later is not refused."""
    done = api.convert(
        net(RANGED, table(400)), policy="all:fp16", dims={"N": 20}, engine=ROUNDS
    )
    assert done.verified.sizes == {"B": 1, "N": 20}


def test_a_length_without_a_limit_is_said() -> None:
    body = SIZE + "[steps] r = Range(zero, n, one)\n [float] f = Cast<to = 1>(r)\n"
    body += "[column] p = Unsqueeze(f, ones)"
    done = api.convert(net(body, table(1)), policy="all:fp16").verified
    assert done.sizes == {"B": 1, "N": 16}


def test_lengths_stay_affordable() -> None:
    file = frontend.from_model(net(SLICED, table(1)))
    graph = frontend.prepare(file, Policy(scope=Scope.NONE)).graph
    assert affordable({"N": LENGTH}, graph) == {"N": LENGTH}
    assert affordable({"N": 1 << 20}, graph) == {"N": 4096}
