"""A format that a device computes in a wider one: every verb says the same of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import finecast
from finecast import api
from finecast.devices.emulation import explicit_casts
from finecast.devices.targets import EngineRole, list_targets, load_target
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.probe import speed_of
from finecast.numbers.formats import Format
from finecast.planning.cost import RooflineCost
from tests.graph.text import from_text

LOW = (Format.BF16, Format.FP16)
WIDER = [
    (name, fmt)
    for name in list_targets()
    for fmt in LOW
    if load_target(name).engine(EngineRole.MATMUL).computes_in(fmt) is Format.FP32
]
SAME = "no speed is gained"
WIDTH = 512


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """Two products of many weights, which half as many bytes would serve faster."""
    rng = np.random.default_rng(0)
    names = ("x", "h", "y")
    nodes = [
        helper.make_node("MatMul", [names[n], f"w{n}"], [names[n + 1]], name=f"mm{n}")
        for n in range(2)
    ]
    stored = [
        numpy_helper.from_array(
            rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 16, f"w{n}"
        )
        for n in range(2)
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, WIDTH])
        for name in ("x", "y")
    )
    graph = helper.make_graph(nodes, "net", [x], [y], stored)
    opsets = [helper.make_opsetid("", 17)]
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def test_the_targets_that_compute_in_a_wider_format() -> None:
    assert {(name, fmt.label) for name, fmt in WIDER} == {
        *(("avx2", label) for label in ("bf16", "fp16")),
        *(("avx2-vnni", label) for label in ("bf16", "fp16")),
        *(("avx512-vnni", label) for label in ("bf16", "fp16")),
        ("avx512-bf16", "fp16"),
        ("amx", "fp16"),
    }


@pytest.mark.parametrize("name", list_targets())
def test_what_is_stored_as_fp32_takes_the_time_of_fp32(name: str) -> None:
    target = load_target(name)
    graph = from_text(
        "input %0 x fp32[64, 64]\n"
        "node add add onnx::Add fp32 (%0, %0) -> (%1 y fp32[64, 64])\noutput %1\n"
    )
    cost = RooflineCost(target=target, shapes={0: (64, 64), 1: (64, 64)})
    exact = cost.node_time_s(graph, graph.nodes[0], Format.FP32)
    for fmt in LOW:
        if target.stored(fmt) is fmt:
            continue
        assert not target.computes_in(fmt)
        assert cost.node_time_s(graph, graph.nodes[0], fmt) == exact
        assert cost.cast_time_s(graph.values[0], Format.FP32, fmt) == 0.0


@pytest.mark.parametrize(("name", "fmt"), WIDER)
def test_every_verb_says_that_a_format_is_computed_in_a_wider_one(
    name: str, fmt: Format, net: Path
) -> None:
    speed = speed_of(EmulatorEngine(emulation=explicit_casts(name)), fmt)
    assert not speed.gains
    assert speed.text == f"{fmt.label}, which {name} computes in a wider format"
    note, stored = speed.note, load_target(name).stored(fmt) is fmt
    assert note.endswith("only less memory is moved" if stored else SAME)
    asked: dict[str, Any] = {"target": name}
    one, every = (f"{scope}:{fmt.label}" for scope in ("auto", "all"))
    assert note in finecast.convert(net, policy=one, **asked).warnings
    forced = finecast.convert(net, policy=every, **asked)
    assert note in forced.warnings
    assert forced.counts == {fmt.label: 2}
    assert note in api.explain(net, policy=one, **asked).warnings
    assert note in api.explain(net, policy=every, **asked).warnings
    data = {"x": np.random.default_rng(1).normal(size=(8, WIDTH)).astype(np.float32)}
    how: dict[str, Any] = {"data": data, "metric": "cosine", "max_drop": 0.01}
    found = finecast.tune(net, policy=one, **how, **asked)
    assert note in found.why
    if not stored:
        assert not found.improved


def test_a_format_that_the_device_computes_in_has_no_note(net: Path) -> None:
    asked: dict[str, Any] = {"policy": "auto:bf16", "target": "avx512-bf16"}
    assert not finecast.convert(net, **asked).warnings
    assert not api.explain(net, **asked).warnings
