"""Outputs that are decisions: which of their changes the formats explain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import finecast
from finecast.data.deviation import expected
from finecast.data.options import DataOptions
from finecast.engines import installed
from finecast.engines.base import Array, Engine, Feeds, KernelTime, Session
from finecast.engines.fallen_apart import Kernels
from finecast.errors import WrongNumbersError
from finecast.frontends.onnx import Applied
from finecast.native import acceptance
from finecast.native.acceptance import Pair
from finecast.native.judged_outputs import JudgedOutput
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy
from finecast.tuning.result import Result
from tests.frontends.tools import parse, tensor
from tests.graph.text import from_text

ROWS, COLUMNS = 64, 64
RNG = np.random.default_rng(1)
SQUARE = (RNG.normal(size=(COLUMNS, COLUMNS)) / 8).astype(np.float32)
X = RNG.normal(size=(ROWS, COLUMNS)).astype(np.float32)
DATA = DataOptions(data={"x": X}, batch=ROWS)

OPS = {
    "classes": ("int64[64] k", "ArgMax<axis = 1, keepdims = 0>(s)"),
    "mask": ("bool[64,64] k", "Greater(s, shift)"),
    "steps": ("int32[64,64] k", "Cast<to = 6>(s)"),
}
SUFFIXES = ("onnx", "xml")


def saved(kind: str, shift: float, folder: Path, suffix: str = "onnx") -> Path:
    """A product that an offset takes digits of, and what is decided by the sum."""
    output, decision = OPS[kind]
    model = parse(
        f"net (float[64,64] x) => ({output}) <float shift = {{{shift}}}> {{"
        f" [in] z = MatMul(x, w)\n [up] s = Add(z, shift)\n [pick] k = {decision} }}"
    )
    model.graph.initializer.append(tensor("w", SQUARE))
    path = folder / "net.onnx"
    onnx.save(model, path)
    if suffix == "xml":
        openvino = pytest.importorskip("openvino")
        openvino.save_model(
            openvino.convert_model(path), path.with_suffix(".xml"), compress_to_fp16=False
        )
    return path.with_suffix(f".{suffix}")


def convert(net: Path, data: DataOptions | None = DATA) -> Result:
    if not installed("openvino"):
        pytest.skip("needs OpenVINO")
    policy = replace(Policy.parse("all:bf16"), op_formats={"add": Format.BF16})
    return finecast.convert(
        net, net.with_stem("low"), policy, engine="openvino", data=data, force=True
    )


class Spoiled(Session):
    """A session whose outputs something is done to."""

    def __init__(self, session: Session, spoil: Callable[[Array], Array]) -> None:
        self.session, self.spoil = session, spoil
        self.inputs, self.outputs, self.free = session.inputs, session.outputs, session.free

    def run(self, feeds: Feeds) -> dict[str, Array]:
        return {name: self.spoil(a) for name, a in self.session.run(feeds).items()}

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        return self.session.profile(feeds, repeats=repeats)


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[Array], Array]) -> None:
    """Have engines compute converted models wrongly."""
    right = Pair.converted

    def wrong(pair: Pair) -> tuple[Session, Kernels]:
        session, kernels = right(pair)
        return Spoiled(session, change), kernels

    monkeypatch.setattr(Pair, "converted", wrong)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("data", [DATA, None])
@pytest.mark.parametrize("kind", ["classes", "mask"])
def test_decisions_of_which_the_formats_leave_nothing_are_refused(
    kind: str, data: DataOptions | None, suffix: str, tmp_path: Path
) -> None:
    net = saved(kind, 30000, tmp_path, suffix)
    with pytest.raises(WrongNumbersError, match=r"% of the decisions of output 'k.*' change"):
        convert(net, data)
    assert not net.with_stem("low").exists()


def test_a_few_decisions_that_rounding_changes_are_told(tmp_path: Path) -> None:
    done = convert(saved("classes", 8, tmp_path))
    assert "of 64 values differ" in done.verified.note


@pytest.mark.parametrize(
    ("kind", "change"),
    [("classes", lambda k: (k + 1) % COLUMNS), ("mask", np.logical_not)],
)
def test_decisions_that_an_engine_computes_wrongly_are_refused(
    kind: str,
    change: Callable[[Array], Array],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = saved(kind, 0, tmp_path)
    spoil(monkeypatch, change)
    with pytest.raises(WrongNumbersError, match=r"% of the decisions .* computed wrongly"):
        convert(net)


def test_steps_may_be_off_by_one_more_than_their_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = saved("steps", 100, tmp_path)
    convert(net)
    spoil(monkeypatch, lambda k: np.add(k, k))
    with pytest.raises(WrongNumbersError, match="relative error"):
        convert(net)


CHOSEN = """input %0 x fp32[8,16]
node a relu onnx::Relu fp32 (%0) -> (%1 a fp32[8,16])
node b arg_max onnx::ArgMax - (%1) -> (%2 b int64[8])
node c reshape onnx::Reshape - (%2) -> (%3 c int64[8,1])
node d gather onnx::Gather - (%3) -> (%4 d int64[8,1])
output %3
output %4
"""


LOOKUP = """net (float[64,64] x) => (float[64,64] y) {
  [in] z = MatMul(x, w)
  [pick] k = ArgMax<axis = 1, keepdims = 0>(z)
  [look] e = Gather<axis = 0>(w, k)
  [out] y = Add(e, z) }"""


def looked_up(folder: Path) -> Path:
    """Rows that classes pick, which differ altogether where a class does."""
    model = parse(LOOKUP)
    model.graph.initializer.append(tensor("w", SQUARE))
    onnx.save(model, folder / "net.onnx")
    return folder / "net.onnx"


def test_no_right_digit_behind_decisions_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spoil(monkeypatch, np.negative)
    done = convert(looked_up(tmp_path))
    assert any(
        "no digit of it is right behind decisions" in said and "'y'" in said
        for said in done.warnings
    )


@pytest.mark.parametrize("change", [np.negative, lambda a: np.full_like(a, np.nan)])
def test_an_op_that_is_wrong_before_decisions_keeps_fp32(
    change: Callable[[Array], Array], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The op that an engine computes wrongly is found, whatever follows decisions."""
    spoil(monkeypatch, change)
    load, show, spoilt = acceptance.load_model, Applied.with_outputs, list[object]()

    def shown(applied: Applied, names: Sequence[str]) -> object:
        model = show(applied, names)
        if applied.edits:
            spoilt.append(model)
        return model

    def loaded(engine: Engine, model: object) -> Session:
        session = load(engine, model)
        return Spoiled(session, change) if any(m is model for m in spoilt) else session

    monkeypatch.setattr(Applied, "with_outputs", shown)
    monkeypatch.setattr(acceptance, "load_model", loaded)
    with pytest.raises(WrongNumbersError, match="first at 'in'") as caught:
        convert(looked_up(tmp_path))
    assert "in" in caught.value.unfit


def test_what_follows_from_choices_in_another_way_is_not_judged() -> None:
    graph = from_text(CHOSEN)
    bounds = expected(graph, {0: Format.BF16})
    assert bounds.choices == {2: 1, 3: 1}
    wanted = np.arange(8).reshape(8, 1)
    chosen, derived = (
        JudgedOutput.of(graph, bounds, value, wanted) for value in graph.outputs
    )
    assert chosen is not None
    assert derived is None


def judged(wanted: Array, op: str = "arg_max", shape: str = "[8]") -> JudgedOutput:
    graph = from_text(CHOSEN.replace("arg_max", op).replace("b int64[8]", f"b int64{shape}"))
    found = JudgedOutput.of(graph, expected(graph, {0: Format.BF16}), graph.outputs[0], wanted)
    assert found is not None
    return found


def test_few_decisions_and_the_order_of_the_largest_say_nothing() -> None:
    assert not judged(np.array([3])).is_lost(np.array([4]))
    wanted = np.arange(64).reshape(8, 8)
    assert judged(wanted).is_lost(wanted[:, ::-1])
    assert not judged(wanted, "top_k", "[8,8]").is_lost(wanted[:, ::-1])
    assert judged(wanted, "top_k", "[8,8]").is_lost(wanted + 64)
    assert judged(wanted[0], "top_k", "[8,1]").is_lost(wanted[0, ::-1])


def test_masks_that_are_nearly_all_false_need_as_many_changes_as_others() -> None:
    wanted = np.zeros(100, dtype=bool)
    wanted[0] = True
    one = judged(wanted)
    assert not one.is_lost(np.zeros(100, dtype=bool))
    assert one.is_lost(~wanted)
    assert one.excused(0.0) < 0.2
    assert one.excused(1.0) >= 1.0
