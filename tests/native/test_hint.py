"""The engine's own lowering: stated as a plan, tried like one, and an anchor of the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from finecast import api
from finecast.engines import get_engine, probe
from finecast.engines.base import Capability, KernelFormats
from finecast.frontends import onnx as frontend
from finecast.measure.racing import Race
from finecast.native.engine_subject import EngineSubject
from finecast.native.hint import hinted_models, stated
from finecast.native.onnx import OnnxModel
from finecast.native.planning import Judging, make_planner
from finecast.native.subject import Built
from finecast.numbers.formats import Format
from finecast.planning.planner import Planner
from finecast.planning.problem import Proposal
from finecast.planning.proposing import propose
from finecast.rules.policy import Policy
from finecast.tuning.result import Result
from tests.frontends.tools import parse, tensor
from tests.times import race_all

RNG = np.random.default_rng(0)
WIDTH = 16


def residual() -> onnx.ModelProto:
    """x + relu(x @ w + b) @ v, then a norm: what ends in the output stays fp32 in a hint."""
    proto = parse(
        """g (float[n, 16] x) => (float[n, 16] y) {
          p = MatMul(x, w)
          s = Add(p, b)
          r = Relu(s)
          q = MatMul(r, v)
          t = Add(q, b)
          y = Add(x, t)
        }""",
    )
    for name, shape in (("w", (WIDTH, WIDTH)), ("v", (WIDTH, WIDTH)), ("b", (WIDTH,))):
        proto.graph.initializer.append(tensor(name, RNG.standard_normal(shape) / 4))
    for node in proto.graph.node:
        node.name = f"make_{node.output[0]}"
    return proto


@pytest.fixture
def planner(tmp_path: Path) -> Planner:
    path = tmp_path / "model.onnx"
    onnx.save(residual(), path)
    policy = Policy.parse("auto:bf16")
    prepared = frontend.prepare(frontend.load(path), policy)
    return make_planner(prepared, policy, get_engine("openvino"), Judging(measured=True))


def kernel(*names: str, computed: str = "bf16", stored: str = "bf16") -> KernelFormats:
    ops = tuple(f"make_{name}" for name in names)
    return KernelFormats(ops=ops, computed=computed, stored=stored)


def low(planner: Planner, *kernels: KernelFormats, exact: bool = False) -> set[str]:
    plan = stated(planner, kernels, Format.BF16, exact=exact)
    return {name[-1] for name, fmt in plan.formats.items() if fmt is Format.BF16}


def test_a_kernel_is_low_where_its_engine_computes_so(planner: Planner) -> None:
    last = kernel("y", computed="fp32", stored="fp32")
    assert low(planner, kernel("p", "s", "r"), kernel("q", "t"), last) == set("psrqt")


def test_what_follows_a_product_gets_its_sum(planner: Planner) -> None:
    last = kernel("y", computed="fp32", stored="fp32")
    wide = kernel("q", "t", stored="fp32")
    assert low(planner, kernel("p", "s", "r"), wide, last) == set("psrq")


def test_a_product_whose_result_is_not_rounded_stays_fp32_in_the_exact_plan(
    planner: Planner,
) -> None:
    """bert's last product: rounding its result was most of the error."""
    wide = kernel("q", "t", stored="fp32")
    given = (kernel("p", "s", "r"), wide, kernel("y", computed="fp32", stored="fp32"))
    assert low(planner, *given, exact=True) == set("psr")
    stored = (kernel("p", "s", "r"), kernel("q", "t"), kernel("y", computed="fp32"))
    assert low(planner, *stored, exact=True) == low(planner, *stored)


def test_an_op_between_low_ones_is_low(planner: Planner) -> None:
    last = kernel("y", computed="fp32", stored="fp32")
    alone = kernel("r", computed="fp32", stored="fp32")
    assert low(planner, kernel("p", "s"), alone, kernel("q", "t"), last) == set("psrqt")


def test_a_node_without_a_kernel_goes_with_what_it_reads(planner: Planner) -> None:
    last = kernel("y", computed="fp32", stored="fp32")
    assert low(planner, kernel("p", "s"), kernel("q", "t"), last) == set("psrqt")
    assert "r" not in low(planner, kernel("q", "t"), last)


def test_an_engine_without_a_hint_has_none(planner: Planner, tmp_path: Path) -> None:
    file = frontend.load(tmp_path / "model.onnx")
    assert not list(hinted_models(OnnxModel(file=file), get_engine("onnxruntime"), planner))


def test_openvino_states_what_each_kernel_computes_in(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(residual(), path)
    session = get_engine("openvino").load_hinted(path, Format.FP32)  # type: ignore[attr-defined]
    found = session.kernel_formats()
    assert {k.computed for k in found} == {"fp32"}
    assert {name for k in found for name in k.ops} == {f"make_{n}" for n in "psrqty"}


@dataclass(slots=True)
class Lowering:
    """OpenVINO as if its hint lowered the first product, on a CPU of any kind."""

    inner: Any = field(default_factory=lambda: get_engine("openvino"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def load_hinted(self, model: Path | bytes, fmt: Format) -> Any:
        del fmt
        return Chosen(self.inner.load(model))


@dataclass(slots=True)
class Chosen:
    inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def kernel_formats(self) -> list[KernelFormats]:
        return [kernel("p", "s", "r"), kernel("q", "t", "y", computed="fp32", stored="fp32")]


CHOSEN = {f"make_{n}": Format.BF16 if n in "psr" else Format.FP32 for n in "psrqty"}


@pytest.fixture
def lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO with bf16 that gains, and a hint that lowers what ``CHOSEN`` says."""
    opened = EngineSubject.hints

    def hints(self: EngineSubject, planner: Planner) -> Any:
        return opened(replace(self, engine=Lowering()), planner)

    monkeypatch.setattr(EngineSubject, "hints", hints)
    gains = {Format.BF16: Capability(runs=True, speed=2.0)}  # whatever else this machine does
    monkeypatch.setitem(probe._cache, ("openvino", "CPU"), gains)


def tuned(folder: Path, **options: Any) -> Result:
    """Tune for the mean of the output; for its signs where a certificate is asked for."""
    options.setdefault("tolerance", 0.5)
    onnx.save(residual(), folder / "model.onnx")
    x = np.abs(RNG.standard_normal((40, WIDTH))).astype(np.float32)

    def score(run: Any) -> Any:
        found = run({"x": x})["y"].mean(axis=1)
        return found > 0 if "confidence" in options else float(found.mean())

    return api.tune(
        folder / "model.onnx",
        folder / "tuned.onnx",
        evaluate=score,
        calib=lambda: [{"x": x}],
        policy="auto:bf16",
        **options,
    )


@pytest.mark.usefixtures("lowering")
@pytest.mark.parametrize(("takes", "wins"), [(0.3, True), (0.7, False)])
def test_what_the_hint_lowers_races_late_if_the_hint_turns_out_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: float, *, wins: bool
) -> None:
    """It is predicted to be slow, and no prediction knows what an engine spares there."""

    def times(self: EngineSubject, built: Mapping[str, Built], *_: object) -> Race:
        del self
        hinted = (name for name, one in built.items() if one.plan.formats == CHOSEN)
        return Race.stated(1.0, {**dict.fromkeys(built, 0.5), **dict.fromkeys(hinted, takes)})

    def others(*given: Any, **named: Any) -> list[Proposal]:
        return [p for p in propose(*given, **named) if p.plan.formats != CHOSEN]

    monkeypatch.setattr("finecast.tuning.tune.propose", others)
    # Of plans without a predicted time this is what is predicted.
    monkeypatch.setattr(
        "finecast.tuning.belief.evaluate", lambda *_: SimpleNamespace(time_s=1e9)
    )
    monkeypatch.setattr(EngineSubject, "times", times)
    outcome = tuned(tmp_path)
    raced = [one.plan.formats for one in outcome.findings.candidates]
    assert (outcome.plan.formats == CHOSEN) == wins
    assert (CHOSEN in raced) == wins, "else it waits"


@pytest.mark.usefixtures("lowering")
def test_tune_tries_the_choice_and_shows_the_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Mapping[str, Format]] = []
    plain = OnnxModel.build

    def build(self: OnnxModel, plan: Any) -> Any:
        built.append(plan.formats)
        return plain(self, plan)

    monkeypatch.setattr(OnnxModel, "build", build)
    # Whatever is predicted for so small a net, all plans are timed.
    race_all(monkeypatch)
    outcome = tuned(tmp_path)
    assert CHOSEN in built
    anchor = outcome.baselines[0]
    assert anchor.name == "the engine's bf16 hint"
    assert anchor.passed
    assert anchor.latency_s > 0
    assert anchor.metric == pytest.approx(outcome.baseline.metric, rel=1e-4)
    assert outcome.to_dict()["baselines"][0]["name"] == anchor.name


@pytest.mark.usefixtures("lowering")
def test_what_has_no_certificate_is_not_advised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither plan nor hint is said to miss the limit, which both keep on these data."""

    def times(self: EngineSubject, built: Mapping[str, Built], *_: object) -> Race:
        del self
        return Race.stated(1.0, dict.fromkeys(built, 0.6))

    monkeypatch.setattr(EngineSubject, "times", times)
    outcome = tuned(tmp_path, tolerance=0.01, confidence=0.95)
    assert not outcome.improved
    assert "no plan is certified" in outcome.why
    (anchor,) = outcome.baselines
    assert not anchor.passed
    assert outcome.comparison.rows[1][0] == "the engine's bf16 hint (not certified)"
    assert not [line for line in outcome.lines if "use it instead" in line]
    (faster,) = (line for line in outcome.lines if line.startswith("The next faster plan"))
    assert "within your limit" in faster
    assert "could not be certified at 95% confidence" in faster
    assert outcome.to_dict()["conditions"]["confidence"] == 0.95


@pytest.mark.usefixtures("lowering")
def test_a_hint_that_no_plan_comes_up_to_is_as_fast_as_the_table_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no model was written it is compared with fp32, by the times in the table."""

    def times(self: EngineSubject, built: Mapping[str, Built], *_: object) -> Race:
        del self
        return Race.stated(
            1.0, {n: 0.7 if n == "the engine's bf16 hint" else 1.2 for n in built}
        )

    monkeypatch.setattr(EngineSubject, "times", times)
    outcome = tuned(tmp_path)
    assert not outcome.improved
    assert outcome.comparison.rows[1][-1] == "x1.43"
    (advice,) = (text for text in outcome.warnings if "use it instead" in text)
    assert advice.startswith(
        f"the engine's bf16 hint is {1 / 0.7 - 1:.1%} faster than fp32 and no less"
    )
