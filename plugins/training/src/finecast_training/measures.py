"""What a way of computing a training step does to its gradients and updates.

Each is compared, by parameter, with the same step in fp32: the relative error, the cosine of
the angle between both, and the elements that became zero or are no finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from scipy import stats

from finecast.naming import percents

Tensors = Mapping[str, torch.Tensor]

# What is less than this share of the usual size has no digits to lose: the gradient of a bias
# before a norm is zero but for roundings, in fp32, too.
_NO_DIGITS: Final = 1e-5
# Two ways count as equally exact within this. On a CPU one way run twice gives the same
# figures to the last digit. Where kernels add up in an order that changes from run to run, as
# on GPUs, roundings of fp32 change, of 2**-24 each, beside those of 2**-9 that are compared.
ALIKE: Final = 1.01
# Shares and angles below this are none.
_NONE: Final = 1e-6
# From so many samples on a figure is worse only if that is known with this confidence.
FEWEST: Final = 3
_CONFIDENCE: Final = 0.95
# Standard deviations by which shares of elements that became zero have to differ. That one of
# two ways loses all of n by chance has the probability 2**-n, below 5% from n = 5 on, and the
# standard deviation of n is sqrt(n).
_BY_CHANCE: Final = math.sqrt(-math.log2(1 - _CONFIDENCE))
# Elements that are compared at a time: what is computed of them stays in a processor's cache,
# and a product in fp32 of so many, added by one thread, is exact to 1e-4.
_BLOCK: Final = 1 << 16
# Squares of numbers of this usual size, and of differences far below it, are in fp32's range.
_SQUARED_IN_FP32: Final = (1e-12, 1e12)


def with_digits(tensors: Tensors) -> list[str]:
    """Names of the tensors that are not zero but for roundings."""
    sizes = {n: t.numel() for n, t in tensors.items()}
    squares = {n: _square(t) for n, t in tensors.items()}
    usual = sum(squares.values()) / max(sum(sizes.values()), 1)
    least = _NO_DIGITS**2 * usual
    return [n for n, square in squares.items() if square > least * sizes[n]]


def _square(tensor: torch.Tensor) -> float:
    """The sum of the squares of the elements that are numbers."""
    norm = float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))
    if not math.isfinite(norm):
        norm = float(torch.linalg.vector_norm(tensor.detach().nan_to_num().double()))
    return norm**2


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDeviation:
    """How far one parameter's gradient, or update, is from that in fp32.

    Attributes:
        error: The relative error.
        angle: One less the cosine of the angle between both.
        vanished: The share of elements that are zero and are not in fp32. There an element
            that is far below the tensor's usual size is zero but for roundings, too.
        nonfinite: The share of elements that are NaN or Inf.
        elements: The number of elements that these shares are of.
    """

    error: float
    angle: float
    vanished: float
    nonfinite: float
    elements: int = 1

    @classmethod
    def of(cls, got: torch.Tensor, wanted: torch.Tensor) -> GradientDeviation:
        """That of ``got`` where ``wanted`` is right."""
        got, wanted = got.detach().flatten(), wanted.detach().flatten()
        products = _Products.of(got, wanted, torch.float32)
        if not products.is_exact(wanted.numel()):
            nonfinite = float((~got.isfinite()).double().mean())
            if nonfinite:
                return cls(
                    error=math.inf,
                    angle=1.0,
                    vanished=0.0,
                    nonfinite=nonfinite,
                    elements=len(got),
                )
            products = _Products.of(got, wanted, torch.float64)
        norm = math.sqrt(products.wanted)
        return cls(
            error=math.sqrt(products.apart) / max(norm, 1e-300),
            angle=products.angle,
            vanished=_vanished(got, wanted, _NO_DIGITS * norm / math.sqrt(max(len(got), 1))),
            nonfinite=0.0,
            elements=len(got),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Products:
    """Products of two tensors, in blocks.

    Attributes:
        wanted: Of one with itself.
        along: Of it with the difference of the other to it.
        apart: Of the difference with itself.
    """

    wanted: float
    along: float
    apart: float

    @classmethod
    def of(cls, got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> _Products:
        """Those of flat tensors, each block computed in ``dtype``, all added in fp64."""
        products = [torch.zeros(3, dtype=dtype, device=wanted.device)]
        for some, right in zip(got.split(_BLOCK), wanted.split(_BLOCK), strict=True):
            y = right.to(dtype)
            d = some.to(dtype) - y
            products.append(torch.stack((torch.dot(y, y), torch.dot(y, d), torch.dot(d, d))))
        own, along, apart = torch.stack(products).double().sum(0).tolist()
        return cls(wanted=own, along=along, apart=apart)

    def is_exact(self, elements: int) -> bool:
        """Whether no product left the range of fp32."""
        low, high = _SQUARED_IN_FP32
        usual = math.sqrt(self.wanted / max(elements, 1))
        return low < usual < high and math.isfinite(self.apart)

    @property
    def angle(self) -> float:
        """One less the cosine of the angle between both.

        By the difference, so that of a small angle no digits are lost.
        """
        square = max(self.wanted + 2 * self.along + self.apart, 0.0)
        own, other = math.sqrt(self.wanted), math.sqrt(square)
        if not own * other:
            return float(own > 0)
        longer = (2 * self.along + self.apart) / (own + other)
        return max((self.apart - longer**2) / (2 * own * other), 0.0)


def _vanished(got: torch.Tensor, wanted: torch.Tensor, least: float) -> float:
    """The share of elements that are zero where ``wanted`` is above ``least``."""
    lost = [torch.zeros((), dtype=torch.int64, device=got.device)]
    for some, right in zip(got.split(_BLOCK), wanted.split(_BLOCK), strict=True):
        if some.is_cuda or int(torch.count_nonzero(some)) < len(some):
            lost.append(((some == 0) & (right.abs() > least)).sum())
    return int(torch.stack(lost).sum()) / max(len(got), 1)


def deviations(
    got: Tensors, wanted: Tensors, names: Iterable[str]
) -> dict[str, GradientDeviation]:
    """Those of the tensors of these names."""
    return {name: GradientDeviation.of(got[name], wanted[name]) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Deviations of many parameters, in several samples: batches at moments of training.

    Each figure has a number for each sample, and is told as their mean.

    Attributes:
        error: The root of the mean of the parameters' squared relative errors.
        worst_error: The largest relative error of a parameter.
        angle: One less the cosine, of the parameter with the largest angle.
        vanished: The share of elements that became zero.
        chance: The variance of that share: which single elements become zero is chance.
        nonfinite: The share of elements that are NaN or Inf.
        worst: The parameter of the largest error on average.
        broken: Parameters with NaN or Inf, with the largest share of them in a sample, in the
            order in which samples have them.
    """

    error: tuple[float, ...]
    worst_error: tuple[float, ...]
    angle: tuple[float, ...]
    vanished: tuple[float, ...]
    chance: tuple[float, ...]
    nonfinite: tuple[float, ...]
    worst: str
    broken: Mapping[str, float]

    @classmethod
    def of(cls, samples: Sequence[Mapping[str, GradientDeviation]]) -> StepFigures:
        """The figures of the deviations by parameter in each of ``samples``."""
        names = dict.fromkeys(name for sample in samples for name in sample)
        squares = {n: mean(s[n].error ** 2 for s in samples if n in s) for n in names}
        shares = {n: max(s[n].nonfinite for s in samples if n in s) for n in names}
        every = [[*sample.values()] for sample in samples]
        return cls(
            error=tuple(math.sqrt(mean(d.error**2 for d in of)) for of in every),
            worst_error=tuple(max((d.error for d in of), default=0.0) for of in every),
            angle=tuple(max((d.angle for d in of), default=0.0) for of in every),
            vanished=tuple(mean(d.vanished for d in of) for of in every),
            chance=tuple(
                mean(d.vanished / max(d.elements, 1) for d in of) / max(len(of), 1)
                for of in every
            ),
            nonfinite=tuple(mean(d.nonfinite for d in of) for of in every),
            worst=max(squares, key=lambda n: squares[n], default=""),
            broken={n: share for n, share in shares.items() if share},
        )

    def beyond(self, other: StepFigures) -> list[str]:
        """Names of the figures that are worse than those of ``other`` on the same samples."""
        worse = [n for n in FIGURES if _is_worse(getattr(self, n), getattr(other, n))]
        return [n for n in worse if n != "vanished" or self._loses_more(other)]

    def _loses_more(self, other: StepFigures) -> bool:
        """Whether more elements became zero than chance gives: a single one is no fault."""
        count = len(self.vanished)
        more = sum(self.vanished) - sum(other.vanished[:count])
        return more > _BY_CHANCE * math.sqrt(sum(self.chance) + sum(other.chance[:count]))

    def text(self, name: str, other: StepFigures) -> str:
        """A figure with its name, and that of autocast in ``other`` on the same samples."""
        own, most = (mean(getattr(of, name)[: len(self.error)]) for of in (self, other))
        if name == "angle":
            texts = [f"{math.degrees(math.acos(max(1 - x, -1))):.3g}" for x in (own, most)]
            return f"angle ({texts[0]} degrees, autocast {texts[1]})"
        texts = percents(own, most)
        return f"{name.replace('_', ' ')} ({texts[0]}, autocast {texts[1]})"

    def to_dict(self) -> dict[str, Any]:
        """The means of the figures by name, and the worst parameter."""
        means = {name: mean(getattr(self, name)) for name in FIGURES}
        return {**means, "worst": self.worst, "broken": dict(self.broken)}


FIGURES: Final = ("error", "worst_error", "angle", "vanished", "nonfinite")


def _is_worse(own: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the mean is larger by more than what counts as equal, and not by chance.

    Both are of the same samples, or ``own`` of the first of them: the differences are tested.
    """
    other = other[: len(own)]
    most = mean(other)
    if not mean(own) > ALIKE * most + _NONE:  # NaN is not larger
        return any(map(math.isnan, own)) and not any(map(math.isnan, other))
    if not math.isfinite(mean(own)) or len(own) < FEWEST:
        return True
    differences = np.subtract(own, other)
    spread = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    quantile = float(stats.t.ppf(_CONFIDENCE, len(differences) - 1))
    return float(differences.mean()) > quantile * spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """The figures of the gradients, and of the updates that an optimizer makes of them."""

    gradients: StepFigures
    updates: StepFigures

    def beyond(self, other: Exactness) -> list[str]:
        """What is worse than in autocast's: ``gradients: error (2%, autocast 1%)``."""
        pairs = {
            "gradients": (self.gradients, other.gradients),
            "updates": (self.updates, other.updates),
        }
        return [
            f"{what}: {own.text(name, most)}"
            for what, (own, most) in pairs.items()
            for name in own.beyond(most)
        ]

    @property
    def error(self) -> float:
        """The error of the gradients, on average over samples."""
        return mean(self.gradients.error)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """All figures."""
        return {"gradients": self.gradients.to_dict(), "updates": self.updates.to_dict()}


def mean(numbers: Iterable[float]) -> float:
    """The mean; 0 of none."""
    every = list(numbers)
    return sum(every) / len(every) if every else 0.0
