from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast
import finecast.torch as ft
from finecast import api
from finecast.data.options import DataOptions
from finecast.engines.usage import how_to_run
from finecast.errors import ModelError, UsageError
from finecast.native.torch import planning, subject
from finecast.numbers.formats import Format
from finecast.rules.base import DECIDED_BY, DECISION, Reason
from finecast.tuning.result import Verdict

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Linear(4 * width, 10)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) * scale


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def inputs(batch: int = 4) -> tuple[tuple[torch.Tensor], dict[str, torch.Tensor]]:
    return (torch.randn(batch, 32),), {"scale": torch.rand(batch, 1)}


def program() -> torch.export.ExportedProgram:
    args, kwargs = inputs()
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {"x": {0: batch}, "scale": {0: batch}}
    return torch.export.export(Net().eval(), args, kwargs, dynamic_shapes=shapes)


class Chain(nn.Module):
    def forward(self, x: torch.Tensor, *, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (x @ a) @ b


def test_keyword_inputs_of_a_program_may_stand_in_any_order() -> None:
    args = (torch.randn(4, 8),)
    kwargs = {"a": torch.randn(8, 4), "b": torch.randn(4, 2)}
    chain = torch.export.export(Chain().eval(), args, kwargs)
    reversed_order = dict(reversed(kwargs.items()))
    low = ft.convert(chain, args, "all:bf16", example_kwargs=reversed_order)
    torch.testing.assert_close(
        low(*args, **kwargs), Chain()(*args, **kwargs), atol=0.2, rtol=0.05
    )
    with pytest.raises(UsageError, match="keyword inputs are a, b, not a, c"):
        ft.convert(chain, args, example_kwargs={"a": kwargs["a"], "c": kwargs["b"]})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt2"
    torch.export.save(program(), path)
    return path


def edited(path: Path, change: Mapping[str, bytes | None]) -> Path:
    """A copy of the archive with some of its records changed, added or left out."""
    result = path.with_name("edited.pt2")
    reader = torch._C.PyTorchFileReader(str(path))
    writer = torch._C.PyTorchFileWriter(str(result))
    names = [n for n in reader.get_all_records() if not n.startswith((".data/", "version"))]
    for name in dict.fromkeys((*names, *change)):
        if name in ("byteorder", "archive_format_version"):
            continue
        content = change[name] if name in change else reader.get_record(name)
        if content is not None:
            writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    return result


def record(path: Path, name: str) -> bytes:
    content: bytes = torch._C.PyTorchFileReader(str(path)).get_record(name)
    return content


def test_convert_of_a_file_tells_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "compiled_frozen", lambda module, *_: (module, frozenset()))
    ft.save(torch.export.export(nn.Linear(16, 4), (torch.ones(2, 16),)), tmp_path / "m.pt2")
    stages: list[str] = []

    def heard(stage: str, done: int, total: int) -> None:
        assert done < total
        stages.append(stage)

    finecast.convert(tmp_path / "m.pt2", policy="matmult:int8", progress=heard)
    assert stages == ["observe", "compile"]


@pytest.mark.parametrize("policy", ["none", "matmult:bf16", "auto:bf16", "matmult:int8"])
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.ones(2, 15),), "was captured with 16 in axis 1, got 15"),
        ((torch.ones(2, 16, dtype=torch.int64),), "was captured with torch.float32, got"),
        ((torch.ones(2, 16), torch.ones(2, 16)), "the program takes 1 inputs, got 2"),
        ((torch.ones(16),), "was captured with a tensor of 2 axes"),
    ],
)
def test_other_examples_than_the_programs_are_refused(
    inputs: tuple[torch.Tensor, ...], message: str, policy: str
) -> None:
    program = torch.export.export(nn.Linear(16, 4), (torch.ones(2, 16),))
    with pytest.raises(UsageError, match=message):
        ft.convert(program, inputs, policy)
    with pytest.raises(UsageError, match=message):
        ft.tune(program, inputs, evaluate=lambda _: 1.0, policy=policy)


def test_convert_file_keeps_shapes_free_and_halves_the_weights(saved: Path) -> None:
    low = saved.with_name("low.pt2")
    result = finecast.convert(saved, low, "all:bf16")
    formats = {d.op: d.format for d in result.plan.decisions}
    assert formats["linear"] is formats["relu"] is Format.BF16
    assert result.verified.relative_error is not None
    assert 0 < result.verified.relative_error < 10 * Format.BF16.unit_roundoff
    again = ft.load(low)
    weights = sum(t.nbytes for t in again.state_dict.values())
    assert weights <= 0.55 * sum(t.nbytes for t in program().state_dict.values())
    args, kwargs = inputs(9)
    assert again.module()(*args, **kwargs).shape == (9, 10)
    with pytest.raises(UsageError, match="output exists"):
        finecast.convert(saved, low)


def test_the_plan_travels_with_the_program_without_figures(saved: Path) -> None:
    low = saved.with_name("low.pt2")
    plan = finecast.explain(saved, policy="matmult:bf16").plan
    measured = Reason(
        rule=DECISION, text="saves 12.5 us", permits=("bf16",), evidence={DECIDED_BY: "time"}
    )
    plan = replace(
        plan,
        decisions=tuple(
            replace(d, reasons=(measured,)) if d.format is Format.BF16 else d
            for d in plan.decisions
        ),
    )
    result = api.apply(plan, saved, low)
    extra = {"finecast.plan.json": ""}
    torch.export.load(low, extra_files=extra)
    assert "12.5 us" in result.plan.to_json()
    assert extra["finecast.plan.json"] == plan.without_figures().to_json()


def test_convert_takes_a_program_s_own_inputs(saved: Path) -> None:
    low = ft.convert(ft.load(saved), policy="all:bf16")
    args, kwargs = inputs()
    assert low(*args, **kwargs).dtype is torch.float32
    with pytest.raises(UsageError, match="needs example inputs"):
        ft.convert(Net())


def npz(path: Path, count: int = 37) -> Path:
    x = np.random.default_rng(0).normal(size=(count, 32)).astype(np.float32)
    scale = np.ones((count, 1), np.float32)
    with torch.no_grad():
        scores = program().module()(torch.from_numpy(x), scale=torch.from_numpy(scale))
    np.savez(path, x=x, scale=scale, label=scores.argmax(1).numpy())
    return path


def test_tune_keeps_the_criterion_or_writes_nothing(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    torch.export.save(program(), saved)
    torch.manual_seed(0)
    data = DataOptions(data=npz(tmp_path / "d.npz"), metric="top1", batch=8)
    out = tmp_path / "tuned.pt2"
    monkeypatch.setattr(subject, "deployed", lambda: lambda module: module)
    outcome = finecast.tune(saved, out, data=data, tolerance=0.05)
    assert outcome.baseline.metric == 1.0
    assert out.exists() == (outcome.verdict is Verdict.IMPROVED)
    if outcome.verdict is Verdict.IMPROVED:
        assert outcome.tuned.metric >= 0.95
        assert ft.load(out).module() is not None


def test_missing_data_is_said_by_name(saved: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", y=np.zeros((4, 32), np.float32))
    data = DataOptions(data=tmp_path / "d.npz", metric="cosine")
    with pytest.raises(UsageError, match="input 'x' is missing"):
        finecast.tune(saved, tmp_path / "t.pt2", data=data)


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (os.mkdir, (str(self.path),))


def graph(path: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads(record(path, "models/model.json"))
    return content


def test_pickles_are_refused_and_not_loaded(saved: Path, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save((Bomb(tmp_path / "gone off"),), buffer, pickle_module=pickle)
    bomb = buffer.getvalue()
    weights = json.loads(record(saved, "data/weights/model_weights_config.json"))
    next(iter(weights["config"].values()))["use_pickle"] = True
    plain = "data/weights/model_weights_config.json"
    cases = {
        "example inputs": {"data/sample_inputs/model.pt": bomb},
        "no plain tensor": {
            plain: json.dumps(weights).encode(),
            "data/weights/weight_0": bomb,
        },
        "unpickle data/constants/opaque_obj_0": {"data/constants/opaque_obj_0": bomb},
        "unpickle data/weights/model.pt": {"data/weights/model.pt": bomb},
        "compiled code": {"data/aotinductor/model/x.so": b"\x7fELF"},
    }
    for message, change in cases.items():
        with pytest.raises(ModelError, match=message):
            ft.load(edited(saved, change))
    assert not (tmp_path / "gone off").exists()


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("call torch.hub.load", ("target", "torch.hub.load")),
        ("call torch.ops.load_library", ("target", "torch.ops.load_library")),
        ("call torch.os.system", ("target", "torch.os.system")),
        ("call _operator.attrgetter", ("target", "_operator.attrgetter")),
        ("call torch.ops.aten.from_file", ("target", "torch.ops.aten.from_file.default")),
        ("evaluate the size", ("expr_str", "__import__('os').getcwd()")),
        ("evaluate the size", ("expr_str", "exec(chr(112))")),
        ("evaluate the size", ("expr_str", "().__class__")),
        ("into Python code", ("name", "x):\n    import os\n    return (")),
        ("container of type", ("in_spec", '[1, {"type": "collections.defaultdict"}]')),
        (
            "key of a container",
            (
                "in_spec",
                '[1, {"type": "builtins.dict", "context": "[{\\"__enum__\\": true}]"}]',
            ),
        ),
    ],
)
def test_code_is_refused(saved: Path, message: str, change: tuple[str, str]) -> None:
    key, value = change
    content = graph(saved)
    assert _replace_first(content, key, value)
    path = edited(saved, {"models/model.json": json.dumps(content).encode()})
    with pytest.raises(ModelError, match=message):
        ft.load(path)


def _replace_first(content: object, key: str, value: str) -> bool:
    if isinstance(content, dict):
        if isinstance(content.get(key), str):
            content[key] = value
            return True
        return any(_replace_first(v, key, value) for v in content.values())
    return isinstance(content, list) and any(_replace_first(v, key, value) for v in content)


def test_trust_reads_what_torch_reads(saved: Path) -> None:
    assert ft.load(edited(saved, {})).graph_signature == ft.load(saved).graph_signature
    assert ft.load(saved, trust=True).graph_signature == ft.load(saved).graph_signature


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18), b"no archive" * 100])
def test_what_is_no_program_is_said_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.pt2"):
        ft.load(path)
    with pytest.raises(UsageError, match="no such file"):
        ft.load(tmp_path / "absent.pt2")


def test_a_zip_of_the_old_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("version", "8.5")
        archive.writestr("serialized_state_dict.pt", pickle.dumps(Bomb(tmp_path / "gone off")))
    with pytest.raises(ModelError):
        ft.load(path)
    assert not (tmp_path / "gone off").exists()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_a_converted_module_compiles_ahead_of_time(saved: Path, tmp_path: Path) -> None:
    source = ft.load(saved)
    low = ft.convert(source, policy="matmult:bf16")
    package = torch._inductor.aoti_compile_and_package(
        ft.export(low, source), package_path=str(tmp_path / "low.aoti.pt2")
    )
    compiled = torch._inductor.aoti_load_package(package)
    for batch in (4, 9):
        args, kwargs = inputs(batch)
        with torch.no_grad():
            want = low(*args, **kwargs)
        # Fused sums may round once less; the products are the same.
        got = compiled(*args, **kwargs)
        assert float((got - want).norm() / want.norm()) < Format.BF16.unit_roundoff


def test_what_is_saved_may_be_named_by_text_and_has_to_be_a_program(tmp_path: Path) -> None:
    made = program()
    path = str(tmp_path / "low.pt2")
    assert ft.save(made, path) == Path(path).stat().st_size
    module = made.module()
    for call in (lambda: ft.save(module, path), lambda: ft.export(module, module)):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"no exported program: finecast\.torch\.export"):
            call()
    with pytest.raises(UsageError, match="no such folder"):
        ft.save(made, tmp_path / "none" / "low.pt2")


def test_ops_that_give_sizes_have_no_type_and_no_internal_name(tmp_path: Path) -> None:
    """``sym_size`` was an op in bf16, in a module that PyTorch calls by a hook's name."""

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(x).reshape(x.shape[0], -1))

    shapes = {"x": {0: torch.export.Dim("B", min=2), 1: torch.export.Dim("T", min=2)}}
    program = torch.export.export(Folded(), (torch.randn(4, 6, 8),), dynamic_shapes=shapes)
    path = tmp_path / "m.pt2"
    torch.export.save(program, path)
    explained = finecast.explain(path, policy="all:bf16")
    graph, plan = explained.graph, explained.plan
    sizes = [node.name for node in graph.nodes if node.op == "shape"]
    assert sizes
    assert not any("hook" in name for name in sizes)
    assert plan.counts == {"bf16": 3}
    found = api.inspect(path)
    assert {row.kind: row.types for row in found.classes}["shape"] == {"other": len(sizes)}
    assert found.notes["dynamic dimensions"].count("(x.") == 2


def test_the_code_that_is_printed_runs_a_program(tmp_path: Path) -> None:
    torch.export.save(program(), tmp_path / "net.pt2")
    done = api.convert(tmp_path / "net.pt2", tmp_path / "low.pt2", "all:bf16")
    names: dict[str, Any] = {}
    exec("\n".join(how_to_run(tmp_path / "low.pt2", "torch-eager", done.counts)), names)
    assert names["outputs"].shape == (4, 10)
