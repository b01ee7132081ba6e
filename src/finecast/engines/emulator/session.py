"""A model of any library run as a device would: rounded in fp32, as ``roundings`` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from finecast.devices.emulation import (
    Emulation,
    Setting,
    device_kernels,
    kernel_numbers,
    setting_of_plan,
)
from finecast.engines.base import Array, EmulatedSession, Feeds, Session, each_call
from finecast.engines.emulator.model import Emulated, emulated
from finecast.engines.emulator.roundings import GraphRoundings
from finecast.engines.loading import exact_session
from finecast.errors import UsageError
from finecast.frontends.native_model import OFFSET, NativeModel
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounding
from finecast.planning.plan import Plan
from finecast.planning.points import SWITCH


def check_emulation(emulation: Emulation, library: str) -> None:
    """Raise UsageError for options that are emulated for ONNX models alone."""
    refused = {
        "stochastic rounding": emulation.rounding is not Rounding.NEAREST_EVEN,
        "accumulation in the low format": not emulation.mixed_accumulation,
        "norms that round before scale and shift": emulation.rounds_normalized,
    }
    for what, asked in refused.items():
        if asked:
            raise UsageError(
                f"{what} is not emulated for {library} models",
                where=f"--target {emulation.target.name}",
                fix="leave that option out, or give the model as ONNX",
            )


@final
@dataclass(slots=True, kw_only=True)
class EmulatorSession(EmulatedSession):
    """A model as a device computes it.

    Attributes:
        copy: Makes a copy of the model.
        emulation: The target and its options.
        setting: What is cast.
        formats: Formats, by node id, of nodes cast to another one than ``emulation.format``.
        low: Low formats in which the model itself stores values, by value id.
        kernels: Nodes that run as one; None for those of ``device_kernels``.
        switched: Whether one model serves all settings, by an extra input. Else one is built
            for each, which runs faster.
    """

    copy: Callable[[], NativeModel]
    emulation: Emulation
    setting: Setting
    formats: Mapping[int, Format] = field(default_factory=dict[int, Format])
    low: Mapping[int, Format] = field(default_factory=dict[int, Format])
    kernels: Sequence[frozenset[int]] | None = None
    switched: bool = False
    _emulated: Emulated | None = field(default=None, init=False)
    _session: Session = field(init=False)
    _own: Mapping[str, Array] = field(init=False)
    _seen: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Build the model for the setting."""
        self.apply(self.setting)

    def apply(self, setting: Setting) -> EmulatorSession:
        """Cast what ``setting`` says from now on; the stream of samples starts anew."""
        fits = self.switched or setting == self.setting
        self.setting = setting
        if self._emulated is None or not fits:
            self._emulated = self._built()
            self._session = exact_session(self._emulated.model)
            fed = {SWITCH, OFFSET, *(w.name for w in self._emulated.weights)}
            self.inputs = [spec for spec in self._session.inputs if spec.name not in fed]
            self.outputs = self._session.outputs
        self._own = self._emulated.feeds(setting)
        return self.restart()

    def _built(self) -> Emulated:
        model = self.copy()
        if not model.emulates_all:
            check_emulation(self.emulation, model.library)
        kernels = self.kernels
        if kernels is None:
            kernels = device_kernels(model.graph, self.emulation)
        roundings = GraphRoundings(
            graph=model.graph,
            emulation=self.emulation,
            kernel_of=kernel_numbers(kernels),
            low=self.low,
            formats=self.formats,
        )
        return emulated(model, roundings, None if self.switched else self.setting)

    def restart(self) -> EmulatorSession:
        """The next sample is the first of the stream."""
        self._seen = 0
        return self

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run one batch as the device would."""
        return self._session.run(self._fed(feeds))

    def _fed(self, feeds: Feeds) -> Feeds:
        """``feeds`` with the inputs that stand for the setting and the place in the stream."""
        own: dict[str, Array] = {**self._own}
        if any(spec.name == OFFSET for spec in self._session.inputs):
            own[OFFSET] = np.array(self._seen, dtype=np.int64)
            self._seen += max((len(a) for a in feeds.values() if a.ndim), default=1)
        return each_call(feeds, lambda call: {**call, **own}) if own else feeds

    @property
    def keeps_state(self) -> bool:
        """Whether outputs depend on the calls before."""
        return self._session.keeps_state

    def reset(self) -> None:
        """Empty the state, if the model has one."""
        self._session.reset()

    def step(self, feeds: Feeds) -> dict[str, Array]:
        """Run one batch on the state that the step before left."""
        return self._session.step(self._fed(feeds))


def plan_session(
    copy: Callable[[], NativeModel],
    plan: Plan,
    emulation: Emulation,
    *,
    formats: Mapping[int, Format] | None = None,
    low: Mapping[int, Format] | None = None,
    fp32_parameters: frozenset[int] = frozenset(),
) -> EmulatorSession:
    """A session with the casts of ``plan``, each op in its format.

    Args:
        copy: Makes a copy of the model.
        plan: The plan.
        emulation: The target and its options.
        formats: The plan's formats by id; None where the model has just the plan's nodes.
        low: As in ``EmulatorSession``.
        fp32_parameters: Nodes whose scale and shift the plan's model keeps in fp32.
    """
    ids = {n.name: n.id for n in copy().graph.nodes}
    if formats is None:
        formats = {ids[name]: fmt for name, fmt in plan.formats.items()}
    lowered = {i: f for i, f in formats.items() if f is not Format.FP32}
    kinds = {*lowered.values()}
    emulation = replace(
        emulation,
        format=kinds.pop() if len(kinds) == 1 else emulation.format,
        encodings={ids[name]: found for name, found in plan.encodings.items() if name in ids},
    )
    return EmulatorSession(
        copy=copy,
        emulation=emulation,
        setting=setting_of_plan(lowered, emulation, fp32_parameters=fp32_parameters),
        formats=lowered,
        low=low or {},
    )
