"""A report's sentences: the ops that it names are those that cost the accuracy."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import finecast
from finecast.planning.alternatives import error_share
from finecast.reports.summary import limiting_units, summary_of
from finecast.rules.policy import Policy
from finecast.tuning.result import Result
from tests.reports import made

WIDTH, LOUD = 256, 20.0
PRODUCTS = ("quiet", "loud", "last")


@pytest.fixture(scope="module")
def outlier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A net in which ``loud`` reads a channel 20 times as large as the others, and its data.

    The steps of int8 have to cover that channel: most of the error is that of ``loud``.
    """
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(size=(WIDTH, WIDTH)) / np.sqrt(WIDTH) for n in PRODUCTS}
    weights["quiet"][:, 0] *= LOUD
    weights["loud"][0] /= LOUD
    nodes, read = [], "x"
    for name in PRODUCTS:
        nodes.append(helper.make_node("MatMul", [read, f"w_{name}"], [name], name=name))
        read = f"{name}_positive"
        nodes.append(helper.make_node("Relu", [name], [read], name=read))
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH])]
        for name in ("x", read)
    ]
    stored = [
        numpy_helper.from_array(w.astype(np.float32), f"w_{n}") for n, w in weights.items()
    ]
    graph = helper.make_graph(nodes, "net", ends[0], ends[1], stored)
    opsets = [helper.make_opsetid("", 17)]
    path = tmp_path_factory.mktemp("outlier") / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path, {"x": rng.normal(size=(256, WIDTH)).astype(np.float32)}


def tuned(outlier: tuple[Path, dict[str, Any]], *in_fp32: str) -> Result:
    """In int8 but for these ops, for a device whose times are modelled."""
    path, data = outlier
    kept = tuple(re.compile(f"^{name}$") for name in in_fp32)
    policy = replace(Policy.parse("auto:int8"), exclude=kept)
    asked: dict[str, Any] = {"metric": "snr_db", "tolerance": 10, "target": "avx512-vnni"}
    return finecast.tune(path, data=data, policy=policy, **asked)


def test_the_error_falls_by_the_share_of_the_first_op_named_if_that_is_in_fp32(
    outlier: tuple[Path, dict[str, Any]],
) -> None:
    found = tuned(outlier)
    assert found.counts["int8"] == len(PRODUCTS)
    content = found.report().to_dict()
    first, *others = content["summary"]["limits"]
    name = content["ops"][first["op"]]["name"]
    assert name == "loud"
    before = found.measured_error or 0.0
    fell = {n: 1 - ((tuned(outlier, n).measured_error or 0.0) / before) ** 2 for n in PRODUCTS}
    assert max(fell, key=lambda n: fell[n]) == name
    assert fell[name] == pytest.approx(first["share"], abs=0.05)
    for one in others:
        assert fell[content["ops"][one["op"]]["name"]] == pytest.approx(one["share"], abs=0.05)
    assert content["summary"]["kept"] == []


def test_report_tune_explain_and_blame_name_the_same_op_first(
    outlier: tuple[Path, dict[str, Any]],
) -> None:
    path, data = outlier
    found = tuned(outlier)
    first = found.report().to_dict()["summary"]["limits"][0]
    said = f"most of the squared error is of: loud {first['share']:.0%}"
    explained = finecast.explain(path, plan=found.plan)
    assert said in str(found)
    assert said in str(explained)
    assert next(iter(explained.to_dict()["largest_shares"])) == "loud"
    blamed = finecast.blame(path, found.plan, data=data, max_error=1e-5)
    name, share = next(iter(blamed.largest_shares.items()))
    assert name == "loud"
    assert share == pytest.approx(first["share"], abs=0.1)
    assert "most of the squared error is of: loud" in str(blamed)


def test_an_op_in_fp32_is_named_apart_however_much_error_it_would_add() -> None:
    content = made.content()
    said = content["summary"]
    assert {content["ops"][one["op"]]["type"] for one in said["limits"]} == {"fp16"}
    assert sum(one["share"] for one in said["limits"]) == pytest.approx(0.75, abs=0.01)
    assert [content["ops"][one["op"]]["name"] for one in said["kept"]] == ["net/layer.1/n2"]
    assert said["kept_heading"].endswith("stays in fp32.")


def test_low_units_are_ranked_by_what_their_return_to_fp32_takes_from_the_error() -> None:
    units = [
        {"type": "int8", "error": {"fp32": fp32, "int8": 0.1}} for fp32 in (0.09, 0.05, 0.0999)
    ]
    kept = {"type": "fp32", "error": {"fp32": 0.1, "int8": 9.0}}
    assert limiting_units([kept, *units]) == [units[1], units[0]]  # the last has too little


def test_a_unit_is_named_by_its_product() -> None:
    content = made.content()
    ops = [
        op | ({"class": "relayout"} if op["type"] == "fp16" else {}) for op in content["ops"]
    ]
    ops[1] |= {"class": "matmul"}
    (first, *_) = (u for u in content["units"] if u["type"] == "fp16")
    said = summary_of(content | {"ops": ops, "units": [first | {"ops": [0, 1]}]})
    assert said["limits"][0]["op"] == 1


@pytest.mark.parametrize("errors", [{}, {"fp32": 0.1}, {"fp32": 0.0, "int8": 0.0}])
def test_no_share_is_told_where_no_error_is_known(errors: dict[str, float]) -> None:
    assert error_share("int8", errors) == 0


def test_an_output_that_is_lost_with_and_without_a_unit_tells_nothing_of_it() -> None:
    lost = float("inf")
    assert error_share("int8", {"fp32": lost, "int8": lost}) == 0
    assert error_share("int8", {"fp32": 0.1, "int8": lost}) == 1
