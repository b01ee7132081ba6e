"""Runs a model in parts: an engine runs the parts, and functions what is between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

from finecast.engines.base import Array, Feeds, Session, calls_of, feeds_for, joined
from finecast.engines.loading import exact_session
from finecast.frontends.onnx.parts import Computed, ModelInParts, RunStep

_ABSENT: Final = ""
"""The name of an input that a node does not have."""


@final
class PartsSession(Session):
    """A session of a model of which some nodes are computed by functions.

    Law: it gives what the whole model gives if the functions give what their nodes give. A
    value is held until the last step that reads it.
    """

    def __init__(self, model: ModelInParts) -> None:
        """Load the whole model, which tells its ports, then the parts.

        Raises:
            EngineError: If one of them cannot be loaded.
        """
        whole = exact_session(model.model)
        self.inputs, self.outputs = whole.inputs, whole.outputs
        self.free, self.joined = whole.free, whole.joined
        del whole
        steps = model.steps()
        ends = [spec.name for spec in self.outputs]  # an output may be a constant
        self._constants = model.constants([*(n for s in steps for n in s.reads), *ends])
        self._steps: Sequence[tuple[RunStep, Session | Computed]] = [
            (step, step.run if callable(step.run) else exact_session(step.run))
            for step in steps
        ]

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run once; of a sequence all calls."""
        return joined([self._called(call) for call in calls_of(feeds)])

    def _called(self, feeds: Feeds) -> dict[str, Array]:
        values: dict[str, Any] = {_ABSENT: None, **self._constants, **feeds}
        for step, run in self._steps:
            if isinstance(run, Session):
                values |= run.run(feeds_for(run, {n: values[n] for n in step.reads}))
            else:
                values[step.gives[0]] = run(*(values[name] for name in step.reads))
            for name in step.last:
                del values[name]
        return {spec.name: values[spec.name] for spec in self.outputs}
