"""A model and a low version of it in one, in which a switch returns ops to fp32.

Each value that both models compute is chosen by an element of the switch: off, it is what the
low op gives, else what the fp32 op gives, computed of the values chosen before. Readers of the
low model get it in the low type, readers of the fp32 model in fp32. So any set of ops is
returned to fp32 by another input, without building and loading a model anew.

Law: with all elements off the outputs are those of the low model, with all on those of the
fp32 model; ops that have no partner in the low model compute in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finecast.frontends.native_model import NativeModel, uses_of
from finecast.graph import Value
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchedValue:
    """A value of the fp32 model, its partner in the low one, and the element that chooses.

    ``element`` is None where there is nothing to choose: of inputs, and of what is drawn at
    random, which both models read as the fp32 model draws it.
    """

    value: int
    partner: int
    element: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownValue:
    """Names of outputs of a joined model: what both ops give for a value, in fp32."""

    value: int
    exact: str
    low: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPair:
    """Copies of an fp32 model and of a low version of it, to be joined.

    Attributes:
        exact: The fp32 model.
        low: The low one.
        stored: Low formats of the low model's values, by id.
        rounds: Whether ``low`` was stated in fp32, and its values are to be rounded to these
            formats; else it has low types.
    """

    exact: NativeModel
    low: NativeModel
    stored: Mapping[int, Format]
    rounds: bool = False

    @classmethod
    def of(cls, exact: NativeModel, low: NativeModel) -> ModelPair:
        """Of a low model that has low types."""
        values = ((v.id, v.format or Format.FP32) for v in low.graph.values)
        stored = {i: fmt for i, fmt in values if fmt is not Format.FP32}
        return cls(exact=exact, low=low, stored=stored)


def join(
    pair: ModelPair,
    choices: Sequence[SwitchedValue],
    *,
    elements: int,
    shown: Sequence[ShownValue] = (),
) -> Any:
    """The joined model, with the input ``SWITCH``, a bool vector; ``pair`` is used up.

    Args:
        pair: Both models.
        choices: The values that both compute, and the inputs.
        elements: The number of elements of the switch.
        shown: What the model gives in place of its outputs; empty for these. Each value has a
            choice with an element.

    Raises:
        ModelError: If the models cannot be stated in one.
    """
    pair.exact.join(pair.low)
    return _Joiner(pair, {one.value: one for one in shown}).join(choices, elements)


@dataclass(slots=True)
class _Joiner:
    pair: ModelPair
    shown: Mapping[int, ShownValue]
    outputs: dict[str, Any] = field(default_factory=dict[str, Any])

    def join(self, choices: Sequence[SwitchedValue], elements: int) -> Any:
        pair = self.pair
        for choice in choices:
            self._choose(choice)
        partners = {choice.partner for choice in choices}
        for value, to in pair.stored.items() if pair.rounds else ():
            if value not in partners and pair.low.graph.values[value].constant is None:
                self._give(value, self._rounded(pair.low.tensor(value), to))
        return pair.exact.finish(elements, self.outputs or None)

    def _choose(self, choice: SwitchedValue) -> None:
        exact, graph = self.pair.exact, self.pair.exact.graph
        stored = self.pair.stored.get(choice.partner, Format.FP32)
        tensor = exact.tensor(choice.value)
        if choice.element is not None:
            other = self._cast(self.pair.low.tensor(choice.partner), stored, Format.FP32)
            if (names := self.shown.get(choice.value)) is not None:
                self.outputs |= {names.exact: tensor, names.low: other}
            tensor = exact.switched(choice.element, tensor, other)
            exact.give(choice.value, uses_of(graph, choice.value), tensor)
        elif stored is Format.FP32 and graph.values[choice.value].is_input:
            return  # both read the same input
        self._give(choice.partner, self._cast(tensor, Format.FP32, stored))

    def _give(self, partner: int, tensor: Any) -> None:
        """Have all ops of the low model that read a value read ``tensor``."""
        low = self.pair.low
        uses = (use for use in uses_of(low.graph, partner) if use.node is not None)
        low.give(partner, uses, tensor)

    def _cast(self, tensor: Any, of: Format, to: Format) -> Any:
        """A value of one model as the other one reads it: one of both formats is fp32."""
        if of is to:
            return tensor
        if self.pair.rounds:
            return self._rounded(tensor, to if of is Format.FP32 else of)
        return self.pair.exact.retyped(tensor, of, to)

    def _rounded(self, tensor: Any, to: Format) -> Any:
        return self.pair.exact.rounded(tensor, Rounder(format=to))


def is_choice(value: Value) -> bool:
    """Whether an op of the fp32 model gives the value, so that it can be chosen."""
    return value.format is Format.FP32 and value.constant is None and not value.is_input
