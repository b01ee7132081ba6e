"""Models of OpenVINO, TensorFlow and PyTorch run as a device would: rounded in fp32.

``roundings`` says what the device rounds. A copy of the model is built for each setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from finecast.devices.emulation import (
    Emulation,
    Setting,
    device_kernels,
    kernel_numbers,
    setting_of_formats,
)
from finecast.engines.base import Array, EmulatedSession, Feeds, Session
from finecast.engines.emulator.model import emulated
from finecast.engines.emulator.roundings import GraphRoundings
from finecast.engines.loading import exact_session
from finecast.errors import UsageError
from finecast.frontends.native_model import OFFSET, NativeModel
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounding
from finecast.planning.plan import Plan


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
class NativeEmulatorSession(EmulatedSession):
    """A model under one setting.

    Attributes:
        copy: Makes a copy of the model.
        emulation: The target and its options.
        setting: What is cast.
        formats: Formats, by node id, of nodes cast to another one than ``emulation.format``.
    """

    copy: Callable[[], NativeModel]
    emulation: Emulation
    setting: Setting
    formats: Mapping[int, Format] = field(default_factory=dict[int, Format])
    _session: Session = field(init=False)
    _seen: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Build the model for the setting."""
        self.apply(self.setting)

    def apply(self, setting: Setting) -> NativeEmulatorSession:
        """Cast what ``setting`` says from now on; the stream of samples starts anew."""
        self.setting = setting
        model = self.copy()
        if not model.emulates_all:
            check_emulation(self.emulation, model.library)
        roundings = GraphRoundings(
            graph=model.graph,
            emulation=self.emulation,
            kernel_of=kernel_numbers(device_kernels(model.graph, self.emulation)),
            formats=self.formats,
        )
        self._session = exact_session(emulated(model, roundings, setting).model)
        self.inputs = [spec for spec in self._session.inputs if spec.name != OFFSET]
        self.outputs = self._session.outputs
        return self.restart()

    def restart(self) -> NativeEmulatorSession:
        """The next sample is the first of the stream."""
        self._seen = 0
        return self

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run one batch as the device would."""
        if len(self.inputs) < len(self._session.inputs):  # it draws numbers for each sample
            feeds = {**feeds, OFFSET: np.array(self._seen, dtype=np.int64)}
            self._seen += max((len(a) for a in feeds.values() if a.ndim), default=1)
        return self._session.run(feeds)

    @property
    def keeps_state(self) -> bool:
        """Whether outputs depend on the calls before."""
        return self._session.keeps_state

    def reset(self) -> None:
        """Empty the state, if the model has one."""
        self._session.reset()

    def step(self, feeds: Feeds) -> dict[str, Array]:
        """Run one batch on the state that the step before left."""
        return self._session.step(feeds)


def plan_session(
    copy: Callable[[], NativeModel], plan: Plan, emulation: Emulation
) -> NativeEmulatorSession:
    """A session with the casts of ``plan``, each op in its format."""
    ids = {n.name: n.id for n in copy().graph.nodes}
    formats = {ids[name]: fmt for name, fmt in plan.formats.items()}
    coded = {ids[name]: found for name, found in plan.encodings.items()}
    low = {i: f for i, f in formats.items() if f is not Format.FP32}
    emulation = replace(emulation, encodings=coded)
    setting = setting_of_formats(low, emulation)
    return NativeEmulatorSession(copy=copy, emulation=emulation, setting=setting, formats=low)
