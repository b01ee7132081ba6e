"""The fp32 model's outputs on some calls, with which those of other models are compared."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from finecast.engines.base import Array, Feeds, Session, joined_outputs, outputs_on
from finecast.planning.sensitivity import counted_outputs, is_float, squared_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """What the fp32 model gives on ``calls``.

    Attributes:
        calls: The inputs.
        names: The names of the outputs, in order.
        outputs: The outputs over all calls, as ``outputs_on`` gives them.
        counted: Numbers of the outputs that errors are told of.
    """

    calls: Sequence[Feeds]
    names: tuple[str, ...]
    outputs: Sequence[Array]
    counted: frozenset[int]

    @classmethod
    def of(cls, session: Session, calls: Sequence[Feeds], of: Collection[str] = ()) -> Exact:
        """Run ``session``; ``of`` are the outputs that the user names, empty for none.

        Without names errors are told of the outputs that copy no input.
        """
        found = [session.run(feeds) for feeds in calls]
        names = tuple(found[0]) if found else ()
        chosen = {n for n, name in enumerate(names) if name in of and is_float(found[0][name])}
        if found and not chosen:
            chosen = counted_outputs(calls[0].values(), [*found[0].values()])
        return cls(
            calls=calls,
            names=names,
            outputs=joined_outputs([[*one.values()] for one in found]),
            counted=frozenset(chosen),
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the float outputs that no error is told of."""
        return tuple(
            name
            for number, (name, array) in enumerate(zip(self.names, self.outputs, strict=True))
            if is_float(array) and number not in self.counted
        )

    def errors(self, session: Session) -> dict[str, float]:
        """Relative errors of another model's outputs by name, the worst first."""
        outputs = outputs_on(session, self.calls)
        found = squared_errors(outputs, self.outputs, self.counted)
        return worst_first({self.names[n]: math.sqrt(error) for n, error in found.items()})

    def error(self, session: Session) -> float:
        """The largest relative error of another model's outputs; 0 if nothing is compared."""
        return max(self.errors(session).values(), default=0.0)


def worst_first(errors: Mapping[str, float]) -> dict[str, float]:
    """Errors by output, the largest first."""
    return dict(sorted(errors.items(), key=lambda item: -item[1]))
