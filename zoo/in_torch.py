"""The stages in PyTorch: ``finecast.torch.convert``, and training with ``compile``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import finecast.torch as ft
from finecast.measure.timing import latency, ratio
from zoo.job import Found, Job, is_wrong
from zoo.network import float_outputs, relative_error
from zoo.outcome import StageError, Status, during

POLICIES = ("all", "auto")


def under_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` inside bf16 autocast on the CPU."""

    def run(**inputs: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return call(**inputs)

    return run


def convert(job: Job) -> Found:
    """Outputs of the converted network, under ``all`` and ``auto``, beside autocast's."""
    with during(Status.NETWORK, "fp32"):
        want = job.reference()
    figures: dict[str, float] = {}
    with during(Status.ENGINE, "torch.autocast"), torch.no_grad():
        low = under_autocast(job.net)(**job.inputs)
        figures["autocast"] = relative_error(float_outputs(low), want)
    for scope in POLICIES:
        with during(Status.FINECAST, f"finecast.torch.convert, {scope}:bf16"), torch.no_grad():
            made = ft.convert(job.net, (), f"{scope}:bf16", example_kwargs=job.inputs)
            got = float_outputs(made(**job.inputs))
            figures[scope] = relative_error(got, want)
        check_types(got, want, scope)
        check_error(figures[scope], figures["autocast"], f"{scope}:bf16", "autocast's")
    return Found(figures=figures)


def check_types(got: list[torch.Tensor], want: list[torch.Tensor], way: str) -> None:
    """Outputs keep their types."""
    mine, true = [x.dtype for x in got], [x.dtype for x in want]
    if mine != true:
        raise StageError(Status.FINECAST, f"{way}: outputs have types {mine}, not {true}")


def check_error(error: float, beside: float, way: str, whose: str) -> None:
    """The error is one that rounding explains."""
    if is_wrong(error, beside):
        raise StageError(
            Status.FINECAST, f"{way}: relative error {error:.3g} beside {whose} {beside:.3g}"
        )


def compile_and_train(job: Job) -> Found:
    """Gradients of the compiled network, and the memory that a step takes."""
    weights = [torch.randn(x.shape) for x in job.reference()]

    def step(call: Callable[..., Any]) -> None:
        outputs = float_outputs(call(**job.inputs))
        pairs = zip(outputs, weights, strict=True)
        sum((o.float() * w).mean() for o, w in pairs).backward()  # type: ignore[union-attr]

    def measured(net: nn.Module, call: Callable[..., Any]) -> list[torch.Tensor]:
        step(call)
        return gradients(net)

    nets = {way: copy.deepcopy(job.net).train() for way in ("fp32", "autocast", "finecast")}
    with during(Status.NETWORK, "training in fp32"):
        want = measured(nets["fp32"], nets["fp32"])
    with during(Status.ENGINE, "torch.compile of torch.autocast"):
        autocast = torch.compile(under_autocast(nets["autocast"]))
        errors = {"autocast": relative_error(measured(nets["autocast"], autocast), want)}
    with (
        during(Status.FINECAST, "finecast.torch.compile"),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        compiled = ft.compile(nets["finecast"])
        errors["finecast"] = relative_error(measured(nets["finecast"], compiled), want)
    check_error(errors["finecast"], errors["autocast"], "gradients", "autocast's")
    plans = compiled.finecast_plans  # type: ignore[attr-defined]
    about = [str(w.message) for w in told if "finecast" in str(w.message)]
    if not any(plan.formats for plan in plans) and not about:
        raise StageError(Status.FINECAST, "finecast.torch.compile planned nothing, silently")
    figures = {f"gradient {way}": error for way, error in errors.items()}
    runs = {"autocast": autocast, "finecast": compiled}
    with during(Status.FINECAST, "memory of a compiled step"):
        for way, call in runs.items():
            nets[way].zero_grad()
            figures[f"MB {way}"] = ft.activation_bytes(lambda c=call: step(c)) / 2**20
    if job.speed:
        calls = {way: lambda c=call: step(c) for way, call in runs.items()}
        times = latency(calls, min_time_s=3.0, repeats=9, warmup=2)
        figures["speed step"] = ratio(times["autocast"], times["finecast"]).median
    return Found(figures=figures, notes=tuple(dict.fromkeys(about)))


def gradients(net: nn.Module) -> list[torch.Tensor]:
    """All gradients as one vector: the error is of the step that an optimizer takes."""
    found = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
    return [torch.cat(found)]
