"""The stages in PyTorch: ``finecast.torch.convert``, and training with ``compile``."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import nn

import finecast.torch as ft
from finecast.engines.torch import rates
from finecast.measure.racing import Effort, Race
from finecast.numbers.formats import Format
from zoo.job import Found, Job, is_wrong
from zoo.network import float_outputs, relative_error
from zoo.outcome import StageError, Status, WrongNumbersError, during

SCOPES: Final = ("all", "auto")
_UNCOMPILED: Final = "aot_eager_decomp_partition"
"""The backend of PyTorch's that does all that Inductor does but for the kernels."""
_DTYPES: Final = {Format.BF16: torch.bfloat16, Format.FP16: torch.float16}


def under_autocast(
    call: Callable[..., Any], dtype: torch.dtype = torch.bfloat16
) -> Callable[..., Any]:
    """``call`` inside autocast on the CPU."""

    def run(**inputs: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype):
            return call(**inputs)

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What an error is held against: autocast's, or the format's where autocast fails."""

    error: float
    name: str
    note: str = ""

    @classmethod
    def autocast(cls, error: Callable[[], float], fmt: Format = Format.BF16) -> Peer:
        """The error that ``error`` finds under autocast; autocast's failure is a note."""
        try:
            with during(Status.ENGINE, "torch.autocast"):
                return cls(error=error(), name="autocast's")
        except StageError as failure:
            name = f"{fmt.label}'s epsilon"
            return cls(error=fmt.epsilon, name=name, note=failure.cause)

    @property
    def figures(self) -> dict[str, float]:
        """Autocast's error, if it has one."""
        return {} if self.note else {"autocast": self.error}

    @property
    def notes(self) -> tuple[str, ...]:
        """Why it has none."""
        return (self.note,) if self.note else ()

    def check(self, error: float, way: str) -> None:
        """``error`` is one that rounding explains.

        Raises:
            StageError: If it is not; NaN of both is not finecast's.
        """
        if math.isnan(error) and math.isnan(self.error):
            raise StageError(Status.ENGINE, f"{way}: NaN, as {self.name} are without finecast")
        if is_wrong(error, self.error):
            cause = f"{way}: relative error {error:.3g} beside {self.name} {self.error:.3g}"
            raise WrongNumbersError(Status.FINECAST, cause)


def autocast_peer(job: Job, fmt: Format = Format.BF16) -> Peer:
    """The error of the network's outputs under autocast in ``fmt``."""

    def error() -> float:
        run = under_autocast(job.net, _DTYPES[fmt])
        with torch.no_grad():
            return relative_error(float_outputs(run(**job.inputs)), job.reference())

    return Peer.autocast(error, fmt)


def convert(job: Job) -> Found:
    """Outputs of the converted network, under ``all`` and ``auto``, beside autocast's."""
    with during(Status.NETWORK, "fp32"):
        want = job.reference()
    peer = autocast_peer(job)
    figures = dict(peer.figures)
    for scope in SCOPES:
        way = f"{scope}:bf16"
        with during(Status.FINECAST, f"finecast.torch.convert, {way}"), torch.no_grad():
            made = ft.convert(job.net, (), way, example_kwargs=job.inputs)
            got = float_outputs(made(**job.inputs))
            figures[scope] = relative_error(got, want)
        peer.check(figures[scope], way)
        mine, true = [x.dtype for x in got], [x.dtype for x in want]
        if mine != true:
            raise StageError(Status.FINECAST, f"{way}: outputs have types {mine}, not {true}")
    return Found(figures=figures, notes=peer.notes)


@dataclass(slots=True, kw_only=True)
class _Way:
    """A way to train: a network of its own, and what to call."""

    net: nn.Module
    call: Callable[..., Any]
    weights: list[torch.Tensor]
    inputs: dict[str, torch.Tensor]

    def step(self) -> None:
        """Forward and backward, the loss a fixed sum of all outputs."""
        outputs = float_outputs(self.call(**self.inputs))
        pairs = zip(outputs, self.weights, strict=True)
        torch.stack([(o.float() * w).mean() for o, w in pairs]).sum().backward()

    def gradients(self) -> list[torch.Tensor]:
        """All gradients of a step as one vector, as an optimizer's step sees them."""
        self.step()
        found = [p.grad.flatten() for p in self.net.parameters() if p.grad is not None]
        return [torch.cat(found)]

    def megabytes(self) -> float:
        """The peak of what a step allocates and frees again."""
        self.net.zero_grad()
        return ft.activation_bytes(self.step) / 2**20

    def saved_megabytes(self) -> float:
        """What the forward pass leaves for the backward pass.

        Its result is not counted: autocast's may be low, where ``compile`` keeps its type.
        """

        def graph() -> list[Any]:
            return [o.grad_fn for o in float_outputs(self.call(**self.inputs))]

        return ft.saved_bytes(graph) / 2**20


def train_where_bf16_pays(job: Job) -> Found:
    """What training would be on a device where products in bf16 take a quarter of the time.

    Plans are those that such a device would be given; their graphs run op by op, autocast's
    too, and no kernel is built. Memory is what the forward pass saves for the backward pass.
    """
    way = _ways(job)
    with during(Status.NETWORK, "training in fp32"):
        want = way(lambda net: net).gradients()
    autocast = way(lambda net: torch.compile(under_autocast(net), backend=_UNCOMPILED))
    peer = Peer.autocast(lambda: relative_error(autocast.gradients(), want))
    figures = {f"gradient {name}": error for name, error in peer.figures.items()}
    figures |= {"MB autocast": autocast.saved_megabytes()} if peer.figures else {}
    for scope in SCOPES:
        with (
            patch.object(rates, "rate", _fast_bf16),
            _op_by_op(),
            during(Status.FINECAST, f"finecast.torch.compile, {scope}:bf16"),
        ):
            mine = way(lambda net, s=scope: ft.compile(net, f"{s}:bf16"))
            error, _ = _planned(mine, want)
            figures[f"MB {scope}"] = mine.saved_megabytes()
        figures[f"gradient {scope}"] = error
        peer.check(error, f"gradients, {scope}:bf16")
    return Found(figures=figures, notes=peer.notes)


def _op_by_op() -> AbstractContextManager[object]:
    """A block in which what finecast compiles builds no kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's modules warn of themselves
        from finecast_training import inductor
    return patch.object(inductor, "compile_inner", inductor.compile_op_by_op)


def _fast_bf16(device: str, fmt: Format, threads: int) -> rates.Rate:
    """Rates such as a CPU with matrix tiles has, whatever this one is."""
    del device, threads
    speed = {Format.BF16: 4.0, Format.FP16: 0.1}.get(fmt, 1.0)
    return rates.Rate(
        product_tflops=0.1 * speed, speed=speed, bandwidth_gb_s=20.0, overhead_s=1e-6
    )


def _ways(job: Job) -> Callable[[Callable[[nn.Module], Callable[..., Any]]], _Way]:
    """Makes copies of the network, to be trained on the same sums of their outputs."""
    weights = [torch.randn(x.shape) for x in job.reference()]

    def way(make: Callable[[nn.Module], Callable[..., Any]]) -> _Way:
        # Code that one backend could not take is left out for all others, until told so.
        torch.compiler.reset()
        net = copy.deepcopy(job.net).train()
        return _Way(net=net, call=make(net), weights=weights, inputs=job.inputs)

    return way


def compile_and_train(job: Job) -> Found:
    """Gradients of the compiled network, and the memory that a step takes."""
    way = _ways(job)
    with during(Status.NETWORK, "training in fp32"):
        want = way(lambda net: net).gradients()
    autocast = way(lambda net: torch.compile(under_autocast(net)))
    peer = Peer.autocast(lambda: relative_error(autocast.gradients(), want))
    figures = {f"gradient {name}": error for name, error in peer.figures.items()}
    figures |= {"MB autocast": autocast.megabytes()} if peer.figures else {}
    told: set[str] = set()
    for scope in SCOPES:
        mine = way(lambda net, s=scope: ft.compile(net, f"{s}:bf16"))
        with during(Status.FINECAST, f"finecast.torch.compile, {scope}:bf16"):
            error, said = _planned(mine, want)
            figures[f"MB {scope}"] = mine.megabytes()
        figures[f"gradient {scope}"] = error
        peer.check(error, f"gradients, {scope}:bf16")
        told.update(said)
        if job.speed and peer.figures and scope == "auto":
            effort = Effort(min_time_s=3.0, rounds=9, warmup=2)
            race = Race.of(autocast.step, {"finecast": mine.step}, effort)
            figures["speed"] = race.speed("finecast").median
    return Found(figures=figures, notes=(*peer.notes, *sorted(told)))


def _planned(mine: _Way, want: list[torch.Tensor]) -> tuple[float, list[str]]:
    """The error of the gradients, and finecast's warnings: it plans something, or warns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = relative_error(mine.gradients(), want)
    said = [str(w.message) for w in caught if "finecast" in str(w.message)]
    plans = mine.call.finecast_plans  # type: ignore[attr-defined]
    if not any(plan.formats for plan in plans) and not said:
        raise RuntimeError("nothing was planned, and nothing said")
    return error, said
