"""Files for Model Explorer: the graph and node data that name the same nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finecast.errors import UsageError
from finecast.reports.content import Sources, content_of
from finecast.reports.plan_report import PlanReport
from finecast_report.model_explorer import explorer_files
from tests.reports import made


def test_node_data_names_nodes_of_the_graph() -> None:
    files = explorer_files(made.content())
    assert [*files] == ["graph", "type", "ms", "error", "gain"]
    (graph,) = files["graph"]["graphs"]
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert nodes["2"]["namespace"] == "net/layer.1"
    assert nodes["2"]["incomingEdges"] == [
        {"sourceNodeId": "1", "sourceNodeOutputId": "0", "targetNodeInputId": "0"}
    ]
    for name in ("type", "ms", "error", "gain"):
        (data,) = files[name].values()
        assert [*files[name]] == [graph["id"]]
        assert data["results"].keys() <= nodes.keys()
        assert data["results"]
    assert files["type"]["chain.onnx"]["results"]["2"]["value"] == "fp32"
    assert files["error"]["chain.onnx"]["results"]["2"]["value"] == pytest.approx(0.2)


def test_edges_between_formats_are_an_overlay() -> None:
    (graph,) = explorer_files(made.content())["graph"]["graphs"]
    (overlay,) = graph["tasksData"]["edgeOverlaysDataListLeftPane"][0]["overlays"]
    assert [(e["sourceNodeId"], e["targetNodeId"], e["label"]) for e in overlay["edges"]] == [
        ("1", "2", "fp16 to fp32"),
        ("2", "3", "fp32 to fp16"),
    ]


def test_files_are_written_once(tmp_path: Path) -> None:
    report = made.result().report()
    written = report.model_explorer(tmp_path / "me")
    assert {path.name for path in written} == {p.name for p in (tmp_path / "me").iterdir()}
    assert all(json.loads(path.read_text()) for path in written)
    with pytest.raises(UsageError, match="output exists"):
        report.model_explorer(tmp_path / "me")
    report.model_explorer(tmp_path / "me", force=True)


def test_a_plan_alone_has_no_graph(tmp_path: Path) -> None:
    report = PlanReport(content=content_of(Sources(model="m", plan=made.result().plan)))
    with pytest.raises(UsageError, match="give the plan's model"):
        report.model_explorer(tmp_path / "me")
    assert not (tmp_path / "me").exists()
