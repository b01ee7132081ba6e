"""One MatMul and Softmax graph through every stage: the artefacts in docs/architecture/.

    python -m docs.walkthrough            write them into its pages
    python -m docs.walkthrough --print    print them

A test checks that its pages and tests/goldens/ have what this prints today. Times come
from a target's roofline and not from this machine, so that the page is the same everywhere.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from finecast.devices.targets import load_target
from finecast.engines import get_engine
from finecast.engines.exact import Exact
from finecast.frontends import onnx as frontend
from finecast.graph import Graph
from finecast.native.observing import observe
from finecast.native.planning import Judging, make_planner
from finecast.native.roundings import Times, probe_sensitivity, switched_probe
from finecast.numbers.formats import Format
from finecast.planning.cost import RooflineCost
from finecast.planning.edits import ConvertConstant, Edit, InsertCast, SetFormat, SetPort
from finecast.planning.planner import Planner
from finecast.planning.points import Place, RoundingPoints, rounding_points
from finecast.planning.problem import Proposal
from finecast.planning.proposing import propose
from finecast.planning.sensitivity import Sensitivity
from finecast.planning.units import Units, make_units
from finecast.progress import silent
from finecast.rules import Permission
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy
from tests.graph.text import to_text

PAGES = sorted(Path(__file__).with_name("architecture").glob("*.md"))
POLICY = Policy.parse("auto:bf16")
TARGET = "avx512-bf16"
# The digest is of the file, and the file's bytes are protobuf's choice.
DIGEST = "0123456789abcdef"
_BLOCK = re.compile(r"<!-- walkthrough: (\S+) -->\n```\w*\n.*?```\n", re.DOTALL)
_LONG = re.compile(r"\d+\.\d{6,}")  # more digits than two machines agree on
_LANGUAGES = {"plan": "json"}


def write_model(path: Path) -> None:
    """``softmax(x @ w)``: x is fp32[n, 1024], w a seeded fp32[1024, 1024]."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    w = (rng.standard_normal((1024, 1024)) / 8).astype(np.float32)
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1024]) for name in "xp"
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["scores"], name="attn/MatMul"),
        helper.make_node("Softmax", ["scores"], ["p"], name="attn/Softmax", axis=-1),
    ]
    weights = [numpy_helper.from_array(w, "w")]
    graph = helper.make_graph(nodes, "attention", ports[:1], ports[1:], weights)
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)


def stages() -> dict[str, str]:
    """The text of each stage's artefact, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "attention.onnx"
        write_model(path)
        return _stages(path)


def _stages(path: Path) -> dict[str, str]:
    file = replace(frontend.load(path), digest=DIGEST)
    prepared = frontend.prepare(file, POLICY)
    feeds = {"x": np.random.default_rng(1).standard_normal((64, 1024)).astype(np.float32)}
    facts = observe(prepared, lambda: [feeds])
    engine = get_engine("openvino")
    planner = make_planner(prepared, POLICY, engine, Judging(facts=facts))
    measured = make_planner(prepared, POLICY, engine, Judging(facts=facts, measured=True))
    units = make_units(prepared.graph, measured.permissions, POLICY.formats)
    points = rounding_points(prepared.graph, units)
    where = {POLICY.format: points}
    exact = Exact.of(engine.load(path), [feeds])
    errors = probe_sensitivity(
        measured, where, lambda some: switched_probe(prepared, some, [feeds]), silent, exact
    )
    sensitivity = errors[POLICY.format]
    shapes = {i: f.shape for i, f in facts.items()}
    cost = RooflineCost(target=load_target(TARGET), shapes=shapes)
    times = Times(units=units, points=where, cost=cost)
    proposals = propose(measured, times.analysis(prepared, measured, errors))
    chosen = proposals[-1]
    applied = frontend.apply(file, chosen.plan)
    return {
        "graph": to_text(prepared.graph),
        "facts": _facts(prepared.graph, facts),
        "permissions": _permissions(prepared.graph, planner.permissions),
        "permissions-measured": _permissions(prepared.graph, measured.permissions),
        "units": _units(prepared.graph, units, points, sensitivity),
        "costs": _costs(measured, cost),
        "frontier": _frontier(proposals),
        "plan": _LONG.sub(lambda f: f"{float(f[0]):.3g}", chosen.plan.to_json()),
        "edits": _edits(applied.graph, applied.edits),
        "onnx": _onnx(frontend.to_bytes(applied.model)),
    }


def _facts(graph: Graph, facts: Mapping[int, ValueFacts]) -> str:
    lines = [
        f"{graph.values[i].name}: shape {list(f.shape)}, largest {f.largest:.3g}, smallest"
        f" {f.smallest_nonzero:.1g}; {f.flushed_share(Format.FP16):.1%} become 0 in fp16"
        for i, f in sorted(facts.items())
    ]
    return "\n".join(lines) + "\n"


def _permissions(graph: Graph, permissions: Mapping[int, Permission]) -> str:
    lines: list[str] = []
    for index, permission in permissions.items():
        labels = ", ".join(sorted(f.label for f in permission.formats))
        lines.append(f"{graph.nodes[index].name}: {labels}")
        lines += [
            f"  {r.rule} leaves {', '.join(r.permits)}: {r.text}" for r in permission.reasons
        ]
    return "\n".join(lines) + "\n"


def _units(
    graph: Graph, units: Units, points: RoundingPoints, sensitivity: Sensitivity
) -> str:
    lines = [
        f"unit {u}: {', '.join(graph.nodes[i].name for i in nodes)}"
        for u, nodes in enumerate(units.members)
    ]
    for point, error in zip(points.points, sensitivity.values, strict=True):
        names = ", ".join(dict.fromkeys(_read_at(graph, place) for place in point.places))
        lines.append(f"round {names}: relative output error {np.sqrt(error):.1g}")
    for unit, error in zip(points.weight_units, sensitivity.weights, strict=True):
        lines.append(f"round the constants of unit {unit}: {np.sqrt(error):.1g}")
    return "\n".join(lines) + "\n"


def _read_at(graph: Graph, place: Place) -> str:
    node, index = place
    value = graph.outputs[index].id if node is None else graph.nodes[node].inputs[index]
    assert value is not None
    return graph.values[value].name


def _costs(planner: Planner, cost: RooflineCost) -> str:
    graph, low = planner.graph, planner.policy.format
    lines: list[str] = []
    for node in graph.float_nodes:
        times = [cost.node_time_s(graph, node, f) for f in (Format.FP32, low)]
        lines.append(
            f"{node.name}: fp32 {1e6 * times[0]:.1f} us, bf16 {1e6 * times[1]:.1f} us"
        )
    lines += [
        f"cast {v.name}: {1e6 * cost.cast_time_s(v, Format.FP32, low):.1f} us"
        for v in graph.values
        if v.constant is None
    ]
    return "\n".join(lines) + "\n"


def _frontier(proposals: list[Proposal]) -> str:
    lines = [
        f"{p.name}: {1e6 * p.time_s:.1f} us, relative error {np.sqrt(p.error):.1g}: "
        + ", ".join(f"{node} {fmt.label}" for node, fmt in p.plan.formats.items())
        for p in proposals
    ]
    return "\n".join(lines) + "\n"


def _edits(graph: Graph, edits: tuple[Edit, ...]) -> str:
    return "".join(f"{_edit(graph, e)}\n" for e in edits)


def _edit(graph: Graph, edit: Edit) -> str:
    if isinstance(edit, SetFormat):
        return f"{graph.nodes[edit.node].name} computes in {edit.to.label}"
    name = graph.values[edit.value].name
    if isinstance(edit, SetPort):
        return f"{name} is declared as {edit.to.label}"
    what = {InsertCast: "cast", ConvertConstant: "convert the constant"}[type(edit)]
    uses = [
        "the model's output"
        if u.node is None
        else f"input {u.index} of {graph.nodes[u.node].name}"
        for u in edit.uses
    ]
    return f"{what} {name} to {edit.to.label} for {', '.join(uses)}"


def _onnx(model: bytes) -> str:
    import onnx

    proto = onnx.load_from_string(model)
    onnx.checker.check_model(proto, full_check=True)
    text = re.sub(r"= +\{[^}]*\}", "= {...}", onnx.printer.to_text(proto))
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def render(page: str, artefacts: Mapping[str, str]) -> str:
    """``page`` with every marked block replaced by its artefact."""

    def block(found: re.Match[str]) -> str:
        name = found[1]
        fence = f"```{_LANGUAGES.get(name, 'text')}\n{artefacts[name]}```\n"
        return f"<!-- walkthrough: {name} -->\n{fence}"

    return _BLOCK.sub(block, page)


def main() -> None:
    """Print the artefacts, or write them into the page."""
    artefacts = stages()
    if "--print" in sys.argv:
        sys.stdout.write("\n".join(f"== {k}\n{v}" for k, v in artefacts.items()))
    else:
        for page in PAGES:
            page.write_text(
                render(page.read_text(encoding="utf-8"), artefacts), encoding="utf-8"
            )


if __name__ == "__main__":
    main()
