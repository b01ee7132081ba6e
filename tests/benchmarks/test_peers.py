"""The comparison with other tools: what counts as valid, and what is written of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from benchmarks.peers import environments, page, produce, results, synthetic
from benchmarks.peers.lot import by_lot, centre
from benchmarks.peers.models import FIXED, MODELS
from benchmarks.peers.results import Row
from benchmarks.peers.task import Task, cosine
from benchmarks.peers.tools import TOOLS, Tool


def row(tool: str, *, model: str = "net", **given: Any) -> Row:
    stated: dict[str, Any] = {
        "versions": "tool 1; openvino 1; a CPU, 2 cores",
        "about": "a net",
        "metric": "top1",
        "tolerance": 0.01,
        "made": {"file": "x.onnx", "seconds": 1.0, "processor_s": 2.0, "evaluations": 3},
        "fp32": {"score": 0.9, "ms": 10.0},
    }
    return Row(model=model, tool=tool, **(stated | given))


def run(score: float, speed: float) -> dict[str, float]:
    return {"score": score, "speed": speed, "ms": 10 / speed}


class TestWhatCounts:
    def test_the_fastest_hint_that_keeps_the_criterion(self) -> None:
        one = row("nncf-quantize", judged={"f32": run(0.895, 2.0), "bf16": run(0.85, 3.0)})
        assert (one.best, one.speed, one.keeps) == ("f32", 2.0, True)

    def test_the_most_exact_one_if_none_keeps_it(self) -> None:
        one = row("nncf-quantize", judged={"f32": run(0.85, 2.0), "bf16": run(0.80, 3.0)})
        assert (one.best, one.keeps) == ("f32", False)
        assert one.reason == "loses 0.0500"

    def test_a_loss_of_just_the_tolerance_is_kept(self) -> None:
        assert 0.9 - 0.89 > 0.01  # in binary
        assert row("inc-onnx", judged={"f32": run(0.89, 1.5)}).keeps

    def test_a_file_that_does_not_run_says_why(self) -> None:
        one = row("inc-onnx", judged={"f32": {"failed": "no such op"}})
        assert (one.best, one.keeps, one.reason) == (None, False, "no such op")

    def test_a_tool_that_fails_says_why(self) -> None:
        assert row("inc-onnx", made={"failed": "not done after 3 s"}).reason.startswith("not")


def test_rows_are_read_as_they_were_written_and_the_last_one_holds(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    first, second = row("inc-onnx"), row("inc-onnx", judged={"f32": run(0.9, 1.5)})
    for one in (first, second, row("olive")):
        results.append(path, one)
    read = results.read(path)
    assert read == {second.key: second, row("olive").key: row("olive")}


class TestThePage:
    def written(self, tmp_path: Path, *rows: Row) -> str:
        path = tmp_path / "peers.md"
        page.write(path, rows)
        ElementTree.parse(path.with_suffix(".svg"))
        return path.read_text(encoding="utf-8")

    def test_names_the_fastest_valid_model_of_another_tool(self, tmp_path: Path) -> None:
        text = self.written(
            tmp_path,
            row("finecast", judged={"f32": run(0.9, 2.0)}),
            row("inc-onnx", judged={"f32": run(0.9, 1.5)}),
            row("olive", judged={"f32": run(0.1, 4.0)}),
        )
        assert "| a net | x 2.00 | 1 | x 1.50, neural-compressor, ONNX (f32) | yes |" in text

    def test_says_where_finecast_is_not_the_fastest(self, tmp_path: Path) -> None:
        text = self.written(
            tmp_path,
            row("finecast", judged={"f32": run(0.9, 1.2)}),
            row("inc-onnx", judged={"f32": run(0.9, 1.5)}),
        )
        assert "**no**" in text

    def test_failures_are_rows_whose_text_cannot_break_the_table(self, tmp_path: Path) -> None:
        text = self.written(tmp_path, row("olive", made={"failed": "a | b\n<script>"}))
        assert "a \\| b &lt;script>" in text


class TestTasks:
    def task(self, folder: Path, **given: Any) -> Task:
        task = Task(folder=folder, metric="top1", tolerance=0.01, about="a net", **given)
        inputs = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
        task.write({"held": {"x": inputs, "s": np.ones((3, 1)), "_truth": np.ones(6)}})
        return Task.read(folder)

    def test_are_read_as_they_were_written(self, tmp_path: Path) -> None:
        task = self.task(tmp_path, state=("s", 1), restart=2)
        assert (task.state, task.restart, len(task.feeds("held"))) == (("s", 1), 2, 3)
        assert set(task.feeds("held")[0]) == {"x", "s"}

    def test_score_outputs(self, tmp_path: Path) -> None:
        task = self.task(tmp_path)
        assert task.score(lambda feed: [feed["x"]], "held") == 1
        assert task.score(lambda feed: [-feed["x"]], "held") == 0

    def test_outputs_that_are_no_numbers_score_nothing(self, tmp_path: Path) -> None:
        task = self.task(tmp_path)
        assert task.score(lambda feed: [feed["x"] * np.nan], "held") == 0

    def test_hand_on_the_state_and_begin_it_with_zeros(self, tmp_path: Path) -> None:
        task = self.task(tmp_path, state=("s", 1), restart=2)
        seen: list[float] = []

        def step(feed: dict[str, Any]) -> list[Any]:
            seen.append(float(feed["s"][0]))
            return [feed["x"], feed["s"] + 5]

        task.score(step, "held")
        assert seen == [0, 5, 0]


class TestProducing:
    def made(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        driver: str = "by_hint",
        env: str = "",
    ) -> Any:
        tool = Tool(title="a tool", used="", driver=driver, env=env)
        monkeypatch.setitem(produce.TOOLS, "a tool", tool)  # pyright: ignore[reportArgumentType]
        task = Task(folder=tmp_path, metric="top1", tolerance=0.01, about="a net")
        task.write({"held": {"x": np.ones((1, 1))}})
        task.model.write_bytes(b"a model")
        return produce.produced(
            "a tool", task, envs=tmp_path, files=tmp_path / "files", limit_s=20.0
        )

    def test_gives_the_file_and_its_cost(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = self.made(tmp_path, monkeypatch)
        assert Path(made["file"]).read_bytes() == b"a model"
        assert made["seconds"] >= 0

    def test_a_tool_that_is_not_there_is_a_row(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert (
            "No module named" in self.made(tmp_path, monkeypatch, driver="by_none")["failed"]
        )

    def test_an_environment_that_does_not_install_is_a_row(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "olive").mkdir()
        wanted = list(environments.REQUIREMENTS["olive"])
        stated = {"requirements": wanted, "failed": "ERROR: no such release"}
        (tmp_path / "olive" / "requirements.json").write_text(json.dumps(stated))
        made = self.made(tmp_path, monkeypatch, env="olive")
        assert made == {"failed": "does not install: ERROR: no such release"}


def test_every_tool_has_its_driver_and_environment() -> None:
    for tool in TOOLS.values():
        assert (Path(produce.__file__).parent / "drivers" / f"{tool.driver}.py").is_file()
        assert not tool.env or tool.env in environments.REQUIREMENTS


def test_the_synthetic_net_needs_its_sensitive_ops(tmp_path: Path) -> None:
    """Rounding the results of the planted ops to bf16 changes decisions; others' do not."""
    path = tmp_path / "net.onnx"
    inputs, sensitive = synthetic.write(200, path)
    model = onnx.load(path)
    planted = {n.name for n in model.graph.node if n.op_type == "Add" and "mul_2" in n.input}
    assert len(planted) == sensitive // 2 > 0

    def rounded(names: set[str]) -> Any:
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        nodes: list[onnx.NodeProto] = []
        for node in changed.graph.node:
            nodes.append(node)
            if node.name in names:
                out = node.output[0]
                node.output[0] = f"{out}_exact"
                low = onnx.helper.make_node("Cast", [f"{out}_exact"], [f"{out}_low"], to=16)
                back = onnx.helper.make_node("Cast", [f"{out}_low"], [out], to=1)
                nodes += [low, back]
        del changed.graph.node[:]
        changed.graph.node.extend(nodes)
        session = onnxruntime.InferenceSession(changed.SerializeToString())
        return session.run(None, {"x": inputs[0]})[0]

    exact = rounded(set()).argmax(axis=1)
    others = {n.name for n in model.graph.node if n.op_type == "MatMul"}
    assert (rounded(planted).argmax(axis=1) == exact).mean() < 0.9
    assert (rounded(others - {model.graph.node[-1].name}).argmax(axis=1) == exact).mean() > 0.9


def test_lots_are_of_the_zoo_and_the_same_each_time() -> None:
    drawn = by_lot(10, 7)
    assert drawn == by_lot(10, 7) != by_lot(10, 8)
    assert len(set(drawn)) == 10
    assert set(drawn) <= MODELS.keys() - set(FIXED)


def test_the_cosine_of_a_sample_is_of_all_its_numbers() -> None:
    exact = np.ones((3, 2, 2, 4))  # three calls of two samples
    low = exact.copy()
    low[0, 0, 0] = 0.0
    got = cosine(low, {"_truth": exact})
    assert got == pytest.approx((5 + np.sqrt(0.5)) / 6)


def test_scores_of_a_lot_are_centred(tmp_path: Path) -> None:
    """Random weights give all inputs nearly the same scores."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 17]>
    g (float[2,3] x) => (float[2,3] y, float[2,3] z) {
      offset = Constant<value = float[3] {5, 6, 7}>()
      y = Add(x, offset)
      z = Relu(y)
    }""")
    onnx.save(model, tmp_path / "m.onnx")
    draw = np.random.default_rng(0)
    calls = [{"x": draw.standard_normal((2, 3)).astype(np.float32)} for _ in range(20)]
    centre(tmp_path / "m.onnx", calls)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    y, z = (
        np.concatenate(of) for of in zip(*(session.run(None, c) for c in calls), strict=True)
    )
    np.testing.assert_allclose(y.mean(axis=0), 0, atol=1e-5)
    assert (z > 2).all()
