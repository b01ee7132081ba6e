"""Ops of one net found in another export of it: how many, and whether they are the right ones.

    .venv-zoo/bin/python -m benchmarks.bench_diff /tmp/exports > benchmarks/RESULTS-diff.md

With a second folder it compares those exports with the ones of another PyTorch in there, which
have the same names; what another release could not export is left out.

Each net of the zoo is exported in four ways. A pair of ops is right if both are of the same
module of the net, by the names of modules that both exporters leave in a file.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import onnx
import torch

from finecast.frontends.onnx import load, prepare
from finecast.graph import Graph
from finecast.graph.matching import Matching, match
from finecast.graph.structure import MODEL_INPUT, Structure, fed, structure_of
from finecast.measure.environment import environment
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.rules.policy import Policy, Scope
from zoo.network import Network
from zoo.networks import NETWORKS
from zoo.onnx_files import Positional

NETS: Final = (
    *("resnet", "efficientnet", "convnext", "vit", "bert", "gpt2", "llama", "t5", "swin"),
)
WAYS: Final = (
    ("script, opset 17", "script, opset 20"),
    ("dynamo", "dynamo, not optimized"),
    ("dynamo", "script, opset 17"),
    ("dynamo", "script, opset 20"),
)
_SCOPES: Final = "pkg.torch.onnx.name_scopes"
_LARGE: Final = 10_000


def main() -> None:
    """Print the tables."""
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    print("# Ops of a net found in another export of it\n")
    print(f"`python -m benchmarks.bench_diff`, torch {torch.__version__}.\n")
    print(_ABOUT)
    print("| net | from | to | ops | found | of those that compute | back | right |")
    print("|---|---|---|---|---|---|---|---|")
    for name in NETS:
        models = {way: _exported(NETWORKS[name], folder / name, way) for way in _EXPORTS}
        for before, after in WAYS:
            print(_row(name, before, after, models[before], models[after]))
    for other in map(Path, sys.argv[2:]):
        _print_versions(folder, other)
    print("\n## Different nets\n\nThe lesser share of either's ops, opset 17.\n")
    print("| nets | found |\n|---|---|")
    graphs = {n: _graph(folder / n / "script, opset 17.onnx") for n in NETS}
    for a, b in itertools.combinations(NETS, 2):
        shares = (Found.of(graphs[x], graphs[y]).share for x, y in ((a, b), (b, a)))
        if (least := min(shares)) >= _SHOWN:
            print(f"| {a}, {b} | {least:.0%} |")
    print(f"\nAll other pairs: below {_SHOWN:.0%}.\n\n## Time\n")
    _time(graphs["bert"])


def _print_versions(folder: Path, other: Path) -> None:
    """The table of exports by two releases of PyTorch."""
    made = sorted(other.glob("*/*.onnx"))
    releases = {onnx.load(path, load_external_data=False).producer_version for path in made}
    print(f"\n## From PyTorch {', '.join(sorted(releases))} to {torch.__version__}\n")
    print("| net | exporter | ops | found | of those that compute | back | right |")
    print("|---|---|---|---|---|---|---|")
    for name in NETS:
        for way in _EXPORTS:
            path = other / name / f"{way}.onnx"
            if path in made:
                same = folder / name / path.name
                row = _row(name, way, "", path, same).replace(" |  |", " |", 1)
                print(row)


_SHOWN: Final = 0.25
_ABOUT: Final = """\
*ops*: those in fp32 that compute from the numbers of an input. Tables and sizes, which
engines compute when they load a model, are left out. *found*: of these ops of the first file
those that are in the second, alone or as a group of ops written as others; *of those that
compute*: leaving out ops that only move numbers. *back*: of the second file's ops, those that
are in the first. *right*: of the pairs whose modules both files name, those of one module or
of two that stand in the same one, as a convolution and the norm that is folded into it.
"""


# Exports.


def _dynamo(net: torch.nn.Module, inputs: Mapping[str, torch.Tensor], to: Path) -> None:
    _by_dynamo(net, inputs, to, optimize=True)


def _plain(net: torch.nn.Module, inputs: Mapping[str, torch.Tensor], to: Path) -> None:
    _by_dynamo(net, inputs, to, optimize=False)


def _by_dynamo(
    net: torch.nn.Module, inputs: Mapping[str, torch.Tensor], to: Path, *, optimize: bool
) -> None:
    torch.onnx.export(
        net, (), to, kwargs=dict(inputs), input_names=list(inputs), dynamo=True,
        verbose=False, optimize=optimize, external_data=False,
    )  # fmt: skip


def _script(opset: int) -> Callable[[torch.nn.Module, Mapping[str, torch.Tensor], Path], None]:
    def export(net: torch.nn.Module, inputs: Mapping[str, torch.Tensor], to: Path) -> None:
        positional = Positional(net, list(inputs)).eval()
        given = tuple(inputs.values())
        torch.onnx.export(
            positional, given, to, input_names=list(inputs), dynamo=False, opset_version=opset
        )

    return export


_EXPORTS: Final = {
    "dynamo": _dynamo,
    "dynamo, not optimized": _plain,
    "script, opset 17": _script(17),
    "script, opset 20": _script(20),
}


def _exported(network: Network, folder: Path, way: str) -> Path:
    """The file of one export, which is made if it is not there."""
    path = folder / f"{way}.onnx"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        net, inputs = network.make()
        with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
            _EXPORTS[way](net, inputs, path)
    return path


def _graph(path: Path) -> Graph:
    return prepare(load(path), Policy(scope=Scope.NONE)).graph


# What is found.


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The ops of one graph in another."""

    before: Graph
    matching: Matching

    @classmethod
    def of(cls, before: Graph, after: Graph) -> Found:
        """By their structures."""
        matching = match(structure_of(before), structure_of(after))
        return cls(before=before, matching=matching)

    def counts(self, *, computing: bool) -> tuple[int, int]:
        """The ops found, and all ops."""
        live = fed(structure_of(self.before))
        counted = {
            n.id
            for n in self.before.nodes
            if n.id in live
            and n.format is Format.FP32
            and by_name(n.op).has_numbers
            and not (computing and by_name(n.op).places)
        }
        groups = {n for g in self.matching.regroupings for n in g.before}
        return len(counted & (groups | self.matching.pairs.keys())), len(counted)

    @property
    def share(self) -> float:
        """The share of ops found."""
        found, all_ops = self.counts(computing=False)
        return found / all_ops


def _row(name: str, before: str, after: str, a: Path, b: Path) -> str:
    one, two = _graph(a), _graph(b)
    there, back = Found.of(one, two), Found.of(two, one)
    found, all_ops = there.counts(computing=False)
    computing, all_computing = there.counts(computing=True)
    right, known = _right(there.matching, (one, _modules(a)), (two, _modules(b)))
    cells = (
        *(name, before, after, str(all_ops), f"{found / all_ops:.1%}"),
        *(f"{computing / all_computing:.1%}", f"{back.share:.1%}"),
        f"{right} of {known}" if known else "not told",
    )
    return f"| {' | '.join(cells)} |"


def _right(
    found: Matching, one: tuple[Graph, Mapping[str, str]], two: tuple[Graph, Mapping[str, str]]
) -> tuple[int, int]:
    """The pairs of ops of one module, and the pairs whose modules are known."""
    (before, mine), (after, theirs) = one, two
    known = [
        (mine[a], theirs[b])
        for n, other in found.pairs.items()
        if (a := before.nodes[n].name) in mine and (b := after.nodes[other].name) in theirs
    ]
    return sum(_same_module(a, b) for a, b in known), len(known)


def _same_module(one: str, two: str) -> bool:
    """Whether both are one module, or stand in one: an exporter folds norms into products."""
    return one == two or one.rpartition(".")[0] == two.rpartition(".")[0]


def _modules(path: Path) -> dict[str, str]:
    """The module of each node that the file names one for."""
    found: dict[str, str] = {}
    for node in onnx.load(path).graph.node:
        noted = {p.key: p.value for p in node.metadata_props}
        if _SCOPES in noted:
            scopes = [str(s) for s in ast.literal_eval(noted[_SCOPES])]
            found[node.name] = scopes[-2] if len(scopes) > 1 else ""
        elif node.name.startswith("/"):
            found[node.name] = _dotted(node.name.split("/")[1:-1])
    return found


def _dotted(parts: Sequence[str]) -> str:
    """``layer1.0.conv1`` of ``net, layer1, layer1.0, conv1``."""
    path: list[str] = []
    for part in parts[1:]:
        if path and part.startswith(f"{path[-1]}."):
            path[-1] = part
        else:
            path.append(part)
    return ".".join(path)


# Time.


def _time(graph: Graph) -> None:
    """The seconds for a net of many layers, with itself and as if trained and named anew."""
    layers = structure_of(graph)
    copies = -(-_LARGE // len(layers))
    large = _repeated(layers, copies)
    other = tuple(
        replace(op, name=f"n{n}", weights=tuple(f"{w}'" for w in op.weights))
        for n, op in enumerate(large)
    )
    print(f"{len(large)} ops, processor time on {environment().cpu}.\n")
    for what, after in (("with itself", large), ("with other names and weights", other)):
        start = time.process_time()
        found = match(large, after)
        took = time.process_time() - start
        right = sum(n == m for n, m in found.pairs.items())
        print(f"- {what}: {took:.2f} s, {right} in their place")


def _repeated(layers: Structure, copies: int) -> Structure:
    """The layers one after another, each reading what the one before gives last."""
    count = len(layers)
    return tuple(
        replace(
            op,
            name=f"{copy}/{op.name}",
            inputs=tuple(
                (copy * count - 1 if copy else MODEL_INPUT)
                if i == MODEL_INPUT
                else i + copy * count
                for i in op.inputs
            ),
        )
        for copy in range(copies)
        for op in layers
    )


if __name__ == "__main__":
    main()
