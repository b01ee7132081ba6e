"""Programs of PyTorch take the way of all other models: options, notes, refusals."""

from __future__ import annotations

from collections.abc import Callable
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
from finecast.cli import main
from finecast.data.options import DataOptions
from finecast.engines import get_engine
from finecast.errors import ModelError, UsageError, WrongNumbersError
from finecast.numbers.formats import Format
from finecast.rules.policy import DEFAULT_POLICY, Policy
from tests.reports import made
from tests.torch.planned import plan_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Scaled(nn.Module):
    """Numbers that, times ``factor`` twice, are beyond fp16's range, or no numbers."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 4)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = torch.tanh(self.first(x)) * self.factor * self.factor
        return self.second(large) / self.factor / self.factor


def saved(folder: Path, module: nn.Module) -> Path:
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=2, max=64)
    free = ({0: batch},)
    program = torch.export.export(module.eval(), (torch.randn(4, 16),), dynamic_shapes=free)
    torch.export.save(program, folder / "m.pt2")
    np.savez(folder / "d.npz", x=np.ones((6, 16), np.float32))
    return folder / "m.pt2"


def test_the_first_op_with_wrong_numbers_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, Scaled(1e3))
    with pytest.raises(WrongNumbersError, match=r"NaN or Inf.*first at 'mul"):
        finecast.convert(path, tmp_path / "low.pt2", "all:fp16")
    assert not (tmp_path / "low.pt2").exists()


def test_the_op_that_first_gives_nan_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, Scaled(float("inf")))
    data = DataOptions(data=tmp_path / "d.npz", metric="cosine", batch=2)
    with pytest.raises(ModelError, match="NaN or Inf is 'mul"):
        finecast.tune(path, tmp_path / "low.pt2", data=data)


def test_data_sizes_and_engines_are_named_as_for_other_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, low = saved(tmp_path, Scaled(1.0)), tmp_path / "low.pt2"
    words = ["--auto-cast", "all", "--force", "-o", str(low)]
    for more in (
        ["--data", str(tmp_path / "d.npz")],
        ["--engine", "torch-eager"],
        ["--engine", "torch:CPU", "--data", str(tmp_path / "d.npz"), "--batch", "3"],
    ):
        assert main(["convert", str(path), *words, *more]) == 0, capsys.readouterr().err
    assert main(["inspect", str(path), "--data", str(tmp_path / "d.npz")]) == 0
    words = ["explain", str(path), "first/linear", "--data", str(tmp_path / "d.npz")]
    assert main(words) == 0
    words = ["profile", str(path), "--engine", "torch-eager", "--no-memory", "--runs", "2"]
    assert main([*words, "--seconds", "0", "--batch", "2"]) == 0
    with pytest.raises(UsageError, match="'openvino' does not run models of PyTorch"):
        finecast.convert(path, low, "all:bf16", engine="openvino", force=True)


def test_what_is_tuned_eagerly_is_run_so() -> None:
    eager, compiled = (get_engine(name).spec for name in ("torch-eager", "torch"))
    assert (eager, compiled) == ("torch-eager:CPU", "torch:CPU")
    found = replace(made.result(), output=Path("low.pt2"))
    assert "model = program.module()" in replace(found, engine=eager).run_notes
    compiling = "model = torch.compile(program.module(), dynamic=False)"
    assert compiling in replace(found, engine=compiled).run_notes


def test_users_rules_keep_a_slow_format() -> None:
    net, x = Scaled(1.0).eval(), torch.randn(4, 16)
    rules = {"mine": lambda view: "fp16" if view.op == "tanh" else None}
    with pytest.warns(UserWarning, match=r"fp16 runs at x0\.1"):
        plan = plan_of(ft.convert(net, (x,), "auto:bf16,fp16", user_rules=rules))
    assert plan.policy == "auto:bf16,fp16"
    assert Format.FP16 in plan.formats.values()


def test_scope_all_is_every_op_and_like_autocast_keeps_its_error() -> None:
    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + 1e-3 * layer(x)
            return x

    torch.manual_seed(0)
    net, x = Stream().eval(), torch.randn(4, 16)
    every = plan_of(ft.convert(net, (x,), "all:bf16"))
    assert set(every.formats.values()) == {Format.BF16}
    like = plan_of(ft.convert(net, (x,), "like-autocast:bf16"))
    formats = {(d.op, d.format) for d in like.decisions}
    assert ("linear", Format.BF16) in formats
    assert ("linear", Format.FP32) not in formats
    assert ("add", Format.BF16) not in formats


def test_a_scope_of_another_library_is_refused(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    spec = [onnx.helper.make_tensor_value_info(n, 1, [2, 2]) for n in "xy"]
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "g", spec[:1], spec[1:])
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )
    for policy, said in {
        "like-autocast:bf16": r"torch\.autocast, for models of PyTorch",
        "like-grappler:bf16": "Grappler, for models of TensorFlow",
    }.items():
        with pytest.raises(UsageError, match=said) as refused:
            finecast.convert(model, policy=policy)
        assert refused.value.fix == "use auto or all"
    with pytest.raises(UsageError, match="Grappler, for models of TensorFlow"):
        ft.convert(nn.Linear(4, 4), (torch.ones(2, 4),), "like-grappler:bf16")


def test_one_policy_is_the_default_of_every_verb() -> None:
    import inspect
    from importlib.util import find_spec

    from finecast import api

    verbs: list[Callable[..., Any]] = [api.convert, api.tune, ft.convert, ft.tune]
    if find_spec("finecast_training") is not None:
        verbs.append(ft.compile)
    found = {inspect.signature(verb).parameters["policy"].default for verb in verbs}
    assert found == {DEFAULT_POLICY}
    assert Policy.of(DEFAULT_POLICY) == Policy(open_formats=True)
