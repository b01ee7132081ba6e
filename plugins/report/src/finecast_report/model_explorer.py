"""Files for Google's Model Explorer: the graph, and node data to colour it by.

``graph.json`` has the ops in their scopes, and marks the edges where a plan changes the type
of a value (edge overlays). Beside it is one file of node data for each of type, time, error
and gain, as far as they are known.

Formats: ``graph_builder.py`` and ``node_data_builder.py`` of the package
``ai-edge-model-explorer``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from finecast.errors import UsageError
from finecast.files import check_writable, write_text

_COLOURS: Final = {
    "fp32": "#c9d1dc",
    "bf16": "#8fbce6",
    "fp16": "#9ad0c2",
    "tf32": "#b9b3e3",
    "int8": "#f2b66d",
    "int8_weights": "#f0d68a",
    "int4_weights": "#e89a8b",
}
_OTHER: Final = "#d9a5cf"
_SLOW: Final = ("#ffffff", "#d1495b")
_GAINS: Final = ("#ffffff", "#1a7f37")


def write_model_explorer(
    content: Mapping[str, Any], folder: Path, *, force: bool
) -> tuple[Path, ...]:
    """Write the files to a folder, which is made if there is none; returns them.

    Raises:
        UsageError: If one exists without ``force``, or the report has no graph.
    """
    if any("inputs" not in op for op in content["ops"]):
        raise UsageError(
            "the report does not know which ops are around one another",
            where="--model-explorer",
            fix="give the plan's model beside it",
        )
    files = {
        name: value for name, value in explorer_files(content).items() if value is not None
    }
    if folder.exists() and not folder.is_dir():
        raise UsageError("it is no folder", where=str(folder), fix="name a folder")
    paths = {folder / f"{name}.json": value for name, value in files.items()}
    if folder.is_dir():
        for path in paths:
            check_writable(path, force=force)
    else:
        folder.mkdir(parents=True)
    for path, value in paths.items():
        write_text(path, json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n")
    return tuple(paths)


def explorer_files(content: Mapping[str, Any]) -> dict[str, Any]:
    """The files by their names without suffix; None for one that nothing is known for."""
    name = content["model"]["name"]
    ops = content["ops"]
    types = {str(i): {"value": op["type"]} for i, op in enumerate(ops) if "type" in op}
    for shown in types.values():
        shown["bgColor"] = _COLOURS.get(shown["value"], _OTHER)
    figures = {
        "ms": (_milliseconds(content), _SLOW),
        "error": (_errors(content), _SLOW),
        "gain": (_gains(content), _GAINS),
    }
    return {
        "graph": _graph(content),
        "type": {name: {"results": types}},
        **{key: _node_data(name, numbers, ends) for key, (numbers, ends) in figures.items()},
    }


def _graph(content: Mapping[str, Any]) -> dict[str, Any]:
    """The graph as a collection of one, each op a node in its scope."""
    values, ops = content["values"], content["ops"]
    nodes: list[dict[str, Any]] = []
    for number, op in enumerate(ops):
        edges: list[dict[str, str]] = []
        for port, index in enumerate(op["inputs"]):
            producer = values[index]["from"]
            if isinstance(producer, int):
                out = ops[producer]["outputs"].index(index)
                edges.append(
                    {
                        "sourceNodeId": str(producer),
                        "sourceNodeOutputId": str(out),
                        "targetNodeInputId": str(port),
                    }
                )
        nodes.append(
            {
                "id": str(number),
                "label": op["op"],
                "namespace": op["scope"],
                "incomingEdges": edges,
                "attrs": _attributes(content, op),
                "outputsMetadata": [
                    {"id": str(port), "attrs": _tensor(values[index])}
                    for port, index in enumerate(op["outputs"])
                ],
            }
        )
    tasks = {"edgeOverlaysDataListLeftPane": [_casts(content)]}
    graph = {"id": content["model"]["name"], "nodes": nodes, "tasksData": tasks}
    return {"label": content["model"]["name"], "graphs": [graph]}


def _attributes(content: Mapping[str, Any], op: Mapping[str, Any]) -> list[dict[str, str]]:
    reasons = [content["reasons"][i]["text"] for i in op.get("deciding", ())]
    attributes = {
        "name": op["name"],
        "native": op["native"],
        "type": op.get("type", ""),
        "ran in": op.get("ran", ""),
        "why": "; ".join(reasons),
        "source": content["lines"][op["line"]] if "line" in op else "",
    }
    return [{"key": key, "value": text} for key, text in attributes.items() if text]


def _tensor(value: Mapping[str, Any]) -> list[dict[str, str]]:
    shape = (
        "?"
        if value["shape"] is None
        else "x".join("?" if d is None else str(d) for d in value["shape"])
    )
    return [
        {"key": "tensor_name", "value": value["name"]},
        {"key": "tensor_shape", "value": f"{value['dtype']}[{shape}]"},
    ]


def _node_data(
    name: str, found: Mapping[int, float], ends: tuple[str, str]
) -> dict[str, Any] | None:
    """Figures of ops, coloured from the least to the largest."""
    if not found:
        return None
    results = {str(op): {"value": value} for op, value in found.items()}
    stops = [{"stop": float(at), "bgColor": colour} for at, colour in enumerate(ends)]
    return {name: {"results": results, "gradient": stops}}


def _milliseconds(content: Mapping[str, Any]) -> dict[int, float]:
    """Time of each op in the tuned model: that of its kernel, in equal parts."""
    milliseconds: dict[int, float] = {}
    for kernel in content["kernels"].get("tuned", ()):
        for op in kernel["ops"]:
            milliseconds[op] = milliseconds.get(op, 0.0) + kernel["ms"] / len(kernel["ops"])
    if milliseconds:
        return milliseconds
    ops = enumerate(content["ops"])
    return {i: op["ms"][op["type"]] for i, op in ops if op.get("type") in op.get("ms", ())}


def _errors(content: Mapping[str, Any]) -> dict[int, float]:
    """The output error if the op's kernel alone were in its format, or in the lowest tried."""
    op_errors: dict[int, float] = {}
    for unit in content["units"]:
        errors = {
            label: (part["weights"] ** 2 + part["activations"] ** 2) ** 0.5
            for label, part in unit["alone"].items()
            if None not in part.values()
        }
        if errors:
            error = errors.get(unit["type"], max(errors.values()))
            op_errors |= dict.fromkeys(unit["ops"], error)
    return op_errors


def _gains(content: Mapping[str, Any]) -> dict[int, float]:
    """Milliseconds that the format of an op's kernel saves it, without casts."""
    return {
        op: unit["ms"]["fp32"] - unit["ms"][unit["type"]]
        for unit in content["units"]
        if "fp32" in unit["ms"] and unit["type"] in unit["ms"] and unit["type"] != "fp32"
        for op in unit["ops"]
    }


def _casts(content: Mapping[str, Any]) -> dict[str, Any]:
    """Edges between ops of different formats, as overlays of edges."""
    values, ops = content["values"], content["ops"]
    edges: list[dict[str, str]] = []
    for number, op in enumerate(ops):
        for index in op["inputs"]:
            producer = values[index]["from"]
            if not isinstance(producer, int):
                continue
            before, after = ops[producer].get("type"), op.get("type")
            if before and after and before != after:
                edges.append(
                    {
                        "sourceNodeId": str(producer),
                        "targetNodeId": str(number),
                        "label": f"{before} to {after}",
                    }
                )
    overlay = {"name": "casts", "edges": edges, "edgeColor": "#d1495b", "edgeWidth": 2}
    return {"type": "edge_overlays", "name": "finecast", "overlays": [overlay]}
