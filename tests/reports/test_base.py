"""What verbs give, in each form: a few lines, tables, JSON, a notebook, a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import finecast
from finecast.cli.output import write_report
from finecast.errors import UsageError
from finecast.reports.base import Report, TextTable
from tests.cli.test_output import ACTS, NASTY
from tests.native.drawn import write_drawn
from tests.native.test_int8 import DATA, NET, SHAPES


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Named(Report):
    name: str
    rows: int = 1

    @property
    def lines(self) -> list[str]:
        return [f"{self.name} in short", "more"]

    @property
    def tables(self) -> list[TextTable]:
        cells = [(self.name, "1.5")] * self.rows
        return [TextTable(title=self.name, left=("what",), right=("ms",), rows=cells)]

    def _content(self) -> dict[str, Any]:
        return {"name": self.name, "ms": float("nan")}


def test_what_comes_from_a_model_acts_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    one = Named(name=f"a{NASTY}<b>")
    assert not ACTS.search(repr(one).replace("\n  ", ""))
    page = one._repr_html_()
    assert not ACTS.search(page.replace("\n", ""))
    assert "<b>" not in page
    write_report(one)
    assert not ACTS.search(capsys.readouterr().out.replace("\n", ""))


def test_large_tables_are_cut_in_a_notebook() -> None:
    page = Named(name="a", rows=1000)._repr_html_()
    assert page.count("<tr>") == 101
    assert "and 900 more rows" in page


def test_a_report_is_saved_with_its_version(tmp_path: Path) -> None:
    path = tmp_path / "named.json"
    Named(name="a").save(path)
    found = json.loads(path.read_text())
    assert found == {"version": 1, "report": "Named", "name": "a", "ms": None}
    with pytest.raises(UsageError, match="exists"):
        Named(name="b").save(path)
    Named(name="b").save(path, force=True)
    assert json.loads(path.read_text())["name"] == "b"


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drawn(tmp_path_factory.mktemp("net") / "net.onnx", NET, SHAPES)


VERBS: dict[str, Callable[[Path], Report]] = {
    "inspect": lambda net: finecast.inspect(net, data=DATA),
    "explain": lambda net: finecast.explain(net),
    "explain a node": lambda net: finecast.explain(
        net, finecast.explain(net).groups[0].example
    ),
    "emulate": lambda net: finecast.emulate(
        net, "trn1", "all:bf16", data=DATA, metric="cosine"
    ),
    "blame": lambda net: finecast.blame(
        net, "trn1", policy="all:fp16", data=DATA, max_error=1e-3
    ),
    "profile": lambda net: finecast.profile(net, memory=False, runs=2, seconds=0.0),
    "convert": lambda net: finecast.convert(net, policy="all:bf16", verify=False),
}
if find_spec("finecast_neuron") is not None:
    from finecast_neuron.compilers import ladder

    VERBS["ladder"] = lambda net: finecast.ladder(
        net, ladder("trn1"), data=DATA, metric="cosine", per_op=False
    )


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_gives_all_forms(
    verb: str, net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = VERBS[verb](net)
    assert isinstance(found, Report)
    first = repr(found).splitlines()[0]
    assert len(first) < 400
    content = found.to_dict()
    assert json.loads(json.dumps(content, allow_nan=False)) == json.loads(json.dumps(content))
    page = found._repr_html_()
    assert "<pre>" in page
    assert all(len(row) == len(t.left) + len(t.right) for t in found.tables for row in t.rows)
    write_report(found)
    said = capsys.readouterr().out
    assert all(head in said for table in found.tables for head in table.left)
    if verb != "convert":  # which saves the model
        found.save(tmp_path / "found.json")
        assert json.loads((tmp_path / "found.json").read_text())["version"] == 1


def test_models_in_memory_are_profiled_beside_files(net: Path) -> None:
    given = onnx.load(net)
    found = finecast.profile(
        [net, given, finecast.load(given)],
        batch=2048,  # OpenVINO lists no kernel that takes less than a microsecond
        memory=False,
        runs=2,
        seconds=0.0,
        ops=True,
    )
    labels = [f.model.label for f in found.figures]
    assert labels[0] == net.name
    assert len({*labels}) == 3
    first, *others = ({op for k in f.kernels for op in k.ops} for f in found.figures)
    assert all(other == first for other in others)
    assert np.isfinite([f.latency.median_s for f in found.figures]).all()


def test_an_opened_model_is_printed_in_a_line(net: Path) -> None:
    assert repr(finecast.load(net)).startswith(f"<ONNX model {net}, ")


def test_a_table_is_printed_in_columns() -> None:
    """The tables that results give were printed as Python's own form of their fields."""
    rows = [("Add", "1.5"), ("a\x1b[2J\nMul", "10.25")]
    table = TextTable(
        title="ops", left=("op",), right=("ms",), rows=rows, notes=("see --slices",)
    )
    assert str(table).splitlines() == [
        "ops",
        "op               ms",
        "Add             1.5",
        "a\\x1b[2J Mul  10.25",
        "see slices",
    ]
    assert str(TextTable(title="ops", left=("op",), rows=[], notes=("none",))) == "ops\nnone"
