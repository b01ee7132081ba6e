"""Results in pickles, as other processes and caches get them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from finecast.errors import UsageError
from finecast.native.artefact import Destination

if TYPE_CHECKING:
    from finecast.tuning.result import Result

_NOT_PLAIN: Final = ("model", "built", "findings", "writer")


@dataclass(frozen=True, slots=True, kw_only=True)
class _NotPlain:
    """The fields of a result that have objects of a model's library, or of this process.

    Law: a copy of the result has them as they are. A pickle has the model, and of the findings
    what was measured, but not what reads the model: the planner, the analysis and the facts.
    A model that cannot be pickled is left out where it was written to a file.
    """

    values: Mapping[str, Any]
    written: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _NotPlain:
        model = copy.deepcopy(self.values["model"], memo)
        return replace(self, values={**self.values, "model": model})

    def __reduce__(self) -> tuple[Any, ...]:
        """The model in a pickle of its own, so that a model without one gives a clear error.

        Raises:
            UsageError: If the model has no pickle.
        """
        model = self.values["model"]
        try:
            pickled = pickle.dumps(model)
        except Exception as error:
            if not self.written:
                kind = type(model)
                raise UsageError(
                    f"an object of {kind.__module__}.{kind.__qualname__} cannot be pickled",
                    where="the result's model",
                    fix="keep result.plan, by which finecast.apply makes the model again, or"
                    " have the model written to a file (output=)",
                ) from error
            pickled = pickle.dumps(None)
        findings = replace(self.values["findings"], planner=None, analysis=None, facts={})
        return _not_plain, (pickled, findings, self.values["writer"] is not None)


def _not_plain(model: bytes, findings: object, writes: bool) -> _NotPlain:
    writer = _refuse_to_write if writes else None
    values = (pickle.loads(model), None, findings, writer)
    return _NotPlain(values=dict(zip(_NOT_PLAIN, values, strict=True)))


def _refuse_to_write(_: Destination) -> object:
    raise UsageError(
        "a result that was read from a pickle does not have the model that it was made of",
        where="result.save",
        fix="finecast.apply(result.plan, MODEL, FILE) writes the same model",
    )


def _result(kind: type[Result], plain: Mapping[str, Any], rest: _NotPlain) -> Result:
    return kind(**plain, **rest.values)


def reduced(result: Result) -> tuple[Any, ...]:
    """A result as ``pickle`` and ``copy`` take it apart."""
    plain = {f.name: getattr(result, f.name) for f in fields(result)}
    values = {name: plain.pop(name) for name in _NOT_PLAIN}
    rest = _NotPlain(values=values, written=result.output is not None)
    return _result, (type(result), plain, rest)
