"""Sites are found in these nets, and rescaling them by powers of two changes no output."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import pytest

from finecast.engines.loading import exact_session
from finecast.frontends import onnx as frontend
from finecast.graph import Graph
from finecast.planning.adjustments import together
from finecast.planning.rescaling import Rescaling
from finecast.planning.scalable import Site, sites, sites_in_front
from finecast.rules.base import Reason
from finecast.rules.policy import Policy, Scope
from tests.frontends.tools import parse
from tests.graph.text import from_text
from tests.planning import nets

# Each is a body with the shapes of its constants; ``x`` is [2, 4, 6, 6] and ``u`` [2, 5, 4].
IMAGES = "(float[2, 4, 6, 6] x)"
ROWS = "(float[2, 5, 4] u)"
CONV = "c = Conv (x, w, b)"
READ = "y = Conv (r, v)"
CONVS = {"w": (8, 4, 1, 1), "b": (8,), "v": (3, 8, 1, 1)}
HEAD = {"w": (8, 4, 1, 1), "b": (8,), "v": (8, 3)}


@dataclass(frozen=True, kw_only=True)
class Net:
    """``found`` has, for each site, its maker, what is divided, and its readers."""

    body: str
    constants: dict[str, tuple[int, ...]]
    found: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = ()
    inputs: str = IMAGES
    outputs: str = "(float[a, b, c, d] y)"


PAIR = (("c", ("w", "b"), ("y",)),)
NETS = {
    "relu": Net(body=f"{CONV} r = Relu (c) {READ}", constants=CONVS, found=PAIR),
    "nothing between": Net(
        body="r = Conv (x, w, b) y = Conv (r, v)",
        constants=CONVS,
        found=(("r", ("w", "b"), ("y",)),),
    ),
    "leaky": Net(
        body=f"{CONV} r = LeakyRelu <alpha = 0.3> (c) {READ}", constants=CONVS, found=PAIR
    ),
    "prelu": Net(
        body=f"{CONV} r = PRelu (c, slope) {READ}",
        constants=CONVS | {"slope": (8, 1, 1)},
        found=PAIR,
    ),
    "pools": Net(
        body=f"{CONV} p = MaxPool <kernel_shape = [2, 2]> (c)"
        f" r = AveragePool <kernel_shape = [2, 2]> (p) {READ}",
        constants=CONVS,
        found=PAIR,
    ),
    "clipped": Net(body=f"{CONV} r = Clip (c, zero, six) {READ}", constants=CONVS),
    "sigmoid": Net(body=f"{CONV} r = Sigmoid (c) {READ}", constants=CONVS),
    "residual": Net(
        body=f"{CONV} d = Conv (x, w2) r = Add (c, d) {READ}",
        constants=CONVS | {"w2": (8, 4, 1, 1)},
    ),
    "fork": Net(
        body=f"{CONV} r = Relu (c) p = MaxPool <kernel_shape = [1, 1]> (r)"
        " d = Conv (r, v) e = Conv (p, v2) y = Add (d, e)",
        constants=CONVS | {"v2": (3, 8, 1, 1)},
        found=(("c", ("w", "b"), ("d", "e")),),
    ),
    "read besides": Net(
        body=f"{CONV} r = Relu (c) d = Conv (r, v) m = ReduceMax <keepdims = 1> (r)"
        " y = Add (d, m)",
        constants=CONVS,
    ),
    "shared weights": Net(
        body=f"{CONV} r = Relu (c) {READ} z = Conv (x, w)",
        constants=CONVS,
        outputs="(float[a, b, c, d] y, float[e, f, g, h] z)",
    ),
    "depthwise between": Net(
        body=f"{CONV} r = Relu (c) d = Conv <group = 8> (r, k, kb) s = Relu (d)"
        " y = Conv (s, v)",
        constants=CONVS | {"k": (16, 1, 3, 3), "kb": (16,), "v": (3, 16, 1, 1)},
        found=(("c", ("w", "b"), ("d",)), ("d", ("k", "kb"), ("y",))),
    ),
    "groups": Net(
        body=f"{CONV} r = Relu (c) y = Conv <group = 2> (r, v)",
        constants=CONVS | {"v": (4, 4, 1, 1)},
    ),
    "mean head": Net(
        body=f"{CONV} r = Relu (c) m = ReduceMean <axes = [2, 3], keepdims = 0> (r)"
        " y = Gemm (m, v)",
        constants=HEAD,
        found=PAIR,
        outputs="(float[a, b] y)",
    ),
    "pooled head": Net(
        body=f"{CONV} r = GlobalAveragePool (c) m = Flatten (r) y = Gemm <transB = 1> (m, v)",
        constants=HEAD | {"v": (3, 8)},
        found=PAIR,
        outputs="(float[a, b] y)",
    ),
    "flattened places": Net(
        body=f"{CONV} m = Flatten (c) y = Gemm (m, v)",
        constants=HEAD | {"v": (8 * 36, 3)},
        outputs="(float[a, b] y)",
    ),
    "divided": Net(body=f"{CONV} r = Div (c, six) {READ}", constants=CONVS, found=PAIR),
    "what divides": Net(body=f"{CONV} r = Div (six, c) {READ}", constants=CONVS),
    "pooled along channels": Net(
        body=f"{CONV} t = Transpose <perm = [0, 2, 1, 3]> (c)"
        " p = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (t)"
        f" r = Transpose <perm = [0, 2, 1, 3]> (p) {READ}",
        constants=CONVS,
    ),
    "layer norm": Net(
        body="n = LayerNormalization (u, g, h) q = MatMul (n, w) k = MatMul (n, v)"
        " y = Add (q, k)",
        constants={"g": (4,), "h": (4,), "w": (4, 7), "v": (4, 7)},
        found=(("n", ("g", "h"), ("k", "q")),),
        inputs=ROWS,
        outputs="(float[a, b, c] y)",
    ),
    "norm of two axes": Net(
        body="n = LayerNormalization <axis = 1> (u, g) y = MatMul (n, w)",
        constants={"g": (5, 4), "w": (4, 7)},
        inputs=ROWS,
        outputs="(float[a, b, c] y)",
    ),
    "norm in steps": Net(
        body="s = Mul (u, u) m = ReduceMean <axes = [-1]> (s) e = Add (m, one) t = Sqrt (e)"
        " d = Div (u, t) n = Mul (g, d) a = Add (n, h) y = MatMul (a, w)",
        constants={"one": (1,), "g": (4,), "h": (4,), "w": (4, 7)},
        found=(("n", ("g", "h"), ("y",)),),
        inputs=ROWS,
        outputs="(float[a, b, c] y)",
    ),
    "norm before a residual": Net(
        body="n = LayerNormalization (u, g, h) q = MatMul (n, w) y = Add (q, n)",
        constants={"g": (4,), "h": (4,), "w": (4, 4)},
        inputs=ROWS,
        outputs="(float[a, b, c] y)",
    ),
    "transposed": Net(
        body="q = MatMul (u, w) a = Add (b, q) t = Transpose <perm = [0, 2, 1]> (a)"
        " y = Conv (t, v)",
        constants={"w": (4, 6), "b": (6,), "v": (3, 6, 1)},
        found=(("q", ("w", "b"), ("y",)),),
        inputs=ROWS,
        outputs="(float[a, b, c] y)",
    ),
}


def prepared(net: Net) -> frontend.Prepared:
    steps = net.body.replace(") ", ")\n").splitlines()
    body = "\n".join(f"[{step.partition(' =')[0]}] {step}" for step in steps)
    constants = nets.drawn(0, **net.constants)
    constants |= {"zero": np.array(0, np.float32), "six": np.array(6, np.float32)}
    if "one" in constants:
        constants["one"] = abs(constants["one"])
    return nets.prepared(f"net {net.inputs} => {net.outputs} {{ {body} }}", constants)


def named(graph: Graph, site: Site) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    nodes, values = graph.nodes, graph.values
    divided = (values[nodes[c.node].inputs[c.port] or 0].name for c in site.divided)
    maker = "" if site.maker is None else nodes[site.maker].name
    return maker, tuple(divided), tuple(sorted(nodes[r.node].name for r in site.readers))


@pytest.mark.parametrize("name", NETS)
def test_sites(name: str) -> None:
    graph = prepared(NETS[name]).graph
    assert tuple(named(graph, site) for site in sites(graph)) == NETS[name].found


def feeds(net: Net) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    if net.inputs == ROWS:
        return {"u": draw.standard_normal((2, 5, 4)).astype(np.float32)}
    return {"x": draw.standard_normal((2, 4, 6, 6)).astype(np.float32)}


def outputs(model: ir.Model, net: Net) -> list[np.ndarray]:
    session = exact_session(model, optimizing=False)
    return [np.asarray(a) for a in session.run(feeds(net)).values()]


WITH_SITES = [name for name, net in NETS.items() if net.found]


@pytest.mark.parametrize("name", WITH_SITES)
def test_powers_of_two_change_no_bit(name: str) -> None:
    net = NETS[name]
    before, draw = prepared(net), np.random.default_rng(2)
    found = [
        Rescaling(
            site=site,
            exponents=draw.integers(-9, 10, site.channels, np.int32),
            reason=Reason(rule="", text=""),
        )
        for site in (*sites(before.graph), *sites_in_front(before.graph))
    ]
    made = [a for one in found for a in one.adjustments(before.graph, range(1000))]
    after = before.adjusted(together((), made))
    for one, other in zip(outputs(before.model, net), outputs(after.model, net), strict=True):
        np.testing.assert_array_equal(one, other)


def test_in_front_of_products_a_multiplication_serves_all_that_read_alike() -> None:
    graph = prepared(NETS["layer norm"]).graph
    (site,) = sites_in_front(graph)
    assert named(graph, site) == ("", (), ("k", "q"))
    assert sites_in_front(prepared(NETS["relu"]).graph) == ()


def test_bodies_have_none() -> None:
    made = parse(
        """net (float[2, 2] u, bool p) => (float[2, 1] y)
        <float[2, 2] w = {1, 2, 3, 4}, float[2, 1] v = {1, 2}> {
        y = If (p) <then_branch = g () => (float[2, 1] a)
          { m = MatMul (u, w) r = Relu (m) a = MatMul (r, v) },
          else_branch = h () => (float[2, 1] b) { b = MatMul (u, v) }> }"""
    )
    graph = frontend.prepare(frontend.from_model(made), Policy(scope=Scope.NONE)).graph
    assert sites(graph) == ()
    assert sites_in_front(graph) == ()


@pytest.mark.parametrize(("groups", "made", "read"), [(8, 1, 1), (8, 2, 1), (4, 1, 2)])
def test_a_convolution_by_groups_reads_channels_where_each_has_its_own(
    groups: int, made: int, read: int
) -> None:
    """OpenVINO's weights have an axis of groups in front."""
    graph = from_text(
        "input %0 x fp32[2, 4, 6, 6]\nconstant %1 w fp32[8, 4, 1, 1] size=32\n"
        f"constant %2 v fp32[{groups}, {made}, {read}, 3, 3] size={groups * made * read * 9}\n"
        "node c conv openvino::Convolution fp32 (%0, %1) -> (%3 c fp32[2, 8, 6, 6])\n"
        "node d group_conv openvino::GroupConvolution fp32 (%3, %2)"
        f" -> (%4 y fp32[2, {groups * made}, 4, 4])\noutput %4\n"
    )
    found = sites(graph)
    if read > 1:
        assert found == ()
        return
    (site,) = found
    (reader,) = site.readers
    assert (site.channels, reader.apart) == (8, True)
    assert (reader.weights.axis, reader.weights.times) == (-5, 1)
