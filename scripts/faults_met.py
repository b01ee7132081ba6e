"""Count in how many models each fault of ``finecast.devices.faults`` is met.

python scripts/faults_met.py [--zoo] [--keep counts.json]

A rewriting of users' files that gets around a fault stays only if one model in a hundred
would suffer otherwise. The models are those of ``shared/models``, the whole nets of onnx's own
suite, the synthetic nets of the peers' benchmark and, with ``--zoo`` in the zoo's environment,
its networks as both of PyTorch's exporters write them. A tenth of the single ops of onnx's
suite is counted apart: they are one model for each way of using an op, however rare that is.

A fault is met where its finder names an op, whatever the rules then decide; the casts of
``exact_casts`` where converting all ops to bf16 for OpenVINO puts them in. Prints a table.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import json
import math
import multiprocessing
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import onnx

ROOT: Final = Path(__file__).resolve().parents[1]
SHARED: Final = Path(os.environ.get("FINECAST_MODELS", ROOT.parent / "shared" / "models"))
TABLE: Final = ROOT / "src" / "finecast" / "devices" / "faults.csv"
SAMPLE: Final = ROOT / "examples" / "digits" / "digits.onnx"
NODES: Final = "single ops"
"""The kind of models that are counted apart."""
_LIMIT_S: Final = 150.0
_OF_ZOO: Final = ("torchvision", "timm", "transformers", "diffusers", "onnxscript")
_EVERY: Final = 10
"""Of the single ops each so many is counted."""
_SYNTHETIC_OPS: Final = (200, 1000)


def met(path: Path) -> set[str]:
    """Names of the faults that the ONNX model at ``path`` meets."""
    import openvino

    from finecast.engines.faults import FAULTS, fault_of_integers
    from finecast.errors import FinecastError
    from finecast.frontends import onnx as frontend
    from finecast.frontends import openvino as openvino_frontend
    from finecast.frontends.exact_casts import FAULT as CASTS
    from finecast.frontends.onnx.miscomputed import miscomputed_ops
    from finecast.frontends.openvino.refused import (
        PADDING,
        TIED,
        computed_padding,
        confused_products,
    )
    from finecast.native.source import AS_IT_IS

    file = frontend.load(path)
    kinds = {node.op_type for node in file.model.graph.all_nodes()}
    found = {fault for _, fault in miscomputed_ops(file.model, lambda: file.model)}
    conditions = {
        "onnx-upsample": "Upsample" in kinds,
        CASTS: _rounds_before_casts(file),
    }
    found |= {name for name, holds in conditions.items() if holds}
    graphs = [frontend.prepare(file, AS_IT_IS).graph]
    with contextlib.suppress(RuntimeError, FinecastError):  # OpenVINO does not read it
        model = openvino.Core().read_model(path)
        found |= {TIED} if confused_products(model.get_ops()) else set()
        found |= {PADDING} if computed_padding(model.get_ops()) else set()
        graphs.append(openvino_frontend.read(model)[0])
    for graph in graphs:
        found |= {f.name for f in FAULTS if any(f.find(graph, low) for low in f.formats)}
        for node in graph.nodes:
            fault = fault_of_integers("openvino", graph, node, math.inf)
            found |= {fault.name} if fault is not None else set()
    return found


def _rounds_before_casts(file: Any) -> bool:
    """Whether a conversion of all ops to bf16 rounds values in fp32 before it casts them."""
    from finecast.engines import get_engine
    from finecast.frontends import onnx as frontend
    from finecast.frontends.exact_casts import rounded_first
    from finecast.frontends.replaying import edits_of
    from finecast.native.planning import make_planner
    from finecast.rules.policy import Policy

    policy = Policy.parse("all:bf16")
    prepared = frontend.prepare(file, policy)
    plan = make_planner(prepared, policy, get_engine("openvino")).lowest()
    return bool(rounded_first(prepared.graph, edits_of(prepared.graph, plan), plan))


Writer = Callable[[Path], object]
"""Writes a model to a path."""


def models(*, zoo: bool) -> Iterator[tuple[str, str, Writer]]:
    """The kind of each model, its name, and what writes it."""
    from tests.conformance.cases import light_cases, node_cases

    for path in sorted(SHARED.rglob("*.onnx")):
        yield "shared models", str(path.relative_to(SHARED)), partial(_link, path)
    for case in light_cases():
        yield "onnx's nets", case.name, partial(onnx.save, case.model)
    for ops in _SYNTHETIC_OPS:
        yield "synthetic nets", f"{ops} ops", partial(_synthetic, ops)
    if zoo:
        from zoo import libraries

        libraries.prepare()
        for library in _OF_ZOO:  # once, and not in each process
            importlib.import_module(library)
        from zoo.networks import NETWORKS

        for exporter in ("torchscript", "dynamo"):
            for name in NETWORKS:
                yield "the zoo", f"{name}, {exporter}", partial(_of_zoo, name, exporter)
    for case in node_cases()[::_EVERY]:
        yield NODES, case.name, partial(onnx.save, case.model)


def _link(source: Path, path: Path) -> None:
    path.symlink_to(source)


def _synthetic(ops: int, path: Path) -> None:
    from benchmarks.peers import synthetic

    synthetic.write(ops, path)


def _of_zoo(name: str, exporter: str, path: Path) -> None:
    from zoo import onnx_files
    from zoo.job import Job
    from zoo.networks import NETWORKS

    net, inputs = NETWORKS[name].make()
    job = Job(network=NETWORKS[name], net=net, inputs=inputs, folder=path.parent)
    onnx_files.write(job, path, exporter)


def _count(write: Writer, answer: Any) -> None:
    """Send the faults that a model meets, or why that is not known."""
    with tempfile.TemporaryDirectory(prefix="finecast-") as folder:
        path = Path(folder) / "model.onnx"
        try:
            write(path)
            answer.send(sorted(met(path)))
        except Exception as error:
            answer.send(f"{type(error).__name__}: {error}"[:200])


def _apart(write: Writer) -> list[str] | str:
    """``_count`` in a process of its own, as exporters and engines may crash."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_count, args=(write, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(_LIMIT_S) else "no answer in time"
    except EOFError:
        return "its process crashed"
    finally:
        process.kill()
        process.join()


def counted() -> set[str]:
    """Names of the faults that ``met`` can find."""
    from finecast.devices.faults import known_faults
    from finecast.engines.faults import FAULTS

    by_hand = ("cast-rounding", "tied-weights", "reduce-axes", "softmax-11", "int64")
    by_hand = (*by_hand, "integer-division", "cast-int64", "computed-padding")
    of_tests = {f.name for f in known_faults().values() if "test_miscomputed" in f.test}
    found = {fault.name for fault in FAULTS if not fault.name.startswith("torch-")}
    return found | of_tests | {f"openvino-{name}" for name in by_hand} | {"onnx-upsample"}


def totals(counts: dict[str, dict[str, Any]]) -> tuple[Counter[str], int, Counter[str], int]:
    """How many nets meet each fault, of how many nets; and the same of single ops."""
    done = [one for one in counts.values() if isinstance(one["met"], list)]
    nets = [one["met"] for one in done if one["kind"] != NODES]
    nodes = [one["met"] for one in done if one["kind"] == NODES]
    return (
        Counter(name for names in nets for name in names),
        len(nets),
        Counter(name for names in nodes for name in names),
        len(nodes),
    )


def table(counts: dict[str, dict[str, Any]]) -> str:
    """The counts as a table, in Markdown."""
    nets, of_nets, nodes, of_nodes = totals(counts)
    lines = [
        f"| fault | of {of_nets} nets | of {of_nodes} single ops |",
        "| --- | --- | --- |",
        *(f"| `{name}` | {nets[name]} | {nodes[name]} |" for name in sorted(counted())),
    ]
    kinds = Counter(one["kind"] for one in counts.values() if isinstance(one["met"], list))
    lines += ["", ", ".join(f"{number} of {kind}" for kind, number in kinds.items())]
    failed = {name: one["met"] for name, one in counts.items() if isinstance(one["met"], str)}
    told = (f"{name}: {why}" for name, why in failed.items())
    return "\n".join([*lines, f"{len(failed)} are not counted:", *told])


def write(counts: dict[str, dict[str, Any]]) -> None:
    """Put the counts of nets into the table of faults."""
    nets, of_nets, _, _ = totals(counts)
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["met"] = f"{nets[row['name']]} of {of_nets}" if row["name"] in counted() else ""
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Count, keep what was counted, and print."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--zoo", action="store_true")
    asked.add_argument("--write", action="store_true", help="put the counts into faults.csv")
    asked.add_argument("--kept", action="store_true", help="count nothing more")
    asked.add_argument("--keep", type=Path, help="counts of this run and of earlier ones")
    given = asked.parse_args()
    counts: dict[str, dict[str, Any]] = {}
    if given.keep is not None and given.keep.exists():
        counts = json.loads(given.keep.read_text(encoding="utf-8"))
    if not given.kept:
        met(SAMPLE)  # imports what each process needs, once
        for kind, name, writer in models(zoo=given.zoo):
            key = f"{kind}: {name}"
            if key not in counts:
                counts[key] = {"kind": kind, "met": _apart(writer)}
                if given.keep is not None:
                    given.keep.write_text(json.dumps(counts, indent=1), encoding="utf-8")
    print(table(counts))
    if given.write:
        write(counts)


if __name__ == "__main__":
    main()
