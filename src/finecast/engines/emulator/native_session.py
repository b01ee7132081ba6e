"""Models of OpenVINO and TensorFlow run as a device would: rounded by arithmetic in fp32.

``roundings`` says what the device rounds. A copy of the model is built for each setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from finecast.devices.emulation import Emulation
from finecast.devices.setting import (
    Setting,
    device_kernels,
    kernel_numbers,
    setting_of_formats,
)
from finecast.engines.base import Array, EmulatedSession, Feeds, Session
from finecast.engines.emulator.roundings import GraphRoundings, RoundTo
from finecast.engines.emulator.views import RoundedViews
from finecast.engines.loading import exact_session
from finecast.errors import UsageError
from finecast.frontends.roundable import Roundable, uses_of
from finecast.graph import Node, Value
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounding, convert
from finecast.planning.edits import Use
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

    copy: Callable[[], Roundable]
    emulation: Emulation
    setting: Setting
    formats: Mapping[int, Format] = field(default_factory=dict[int, Format])
    _session: Session = field(init=False)

    def __post_init__(self) -> None:
        """Build the model for the setting."""
        self.apply(self.setting)

    def apply(self, setting: Setting) -> NativeEmulatorSession:
        """Cast what ``setting`` says from now on."""
        self.setting = setting
        model = self.copy()
        check_emulation(self.emulation, model.library)
        roundings = GraphRoundings(
            graph=model.graph,
            emulation=self.emulation,
            kernel_of=kernel_numbers(device_kernels(model.graph, self.emulation)),
            formats=self.formats,
        )
        self._session = exact_session(_Builder(model, roundings, setting).build())
        self.inputs, self.outputs = self._session.inputs, self._session.outputs
        return self

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run one batch as the device would."""
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
    copy: Callable[[], Roundable], plan: Plan, emulation: Emulation
) -> NativeEmulatorSession:
    """A session with the casts of ``plan``, each op in its format."""
    ids = {n.name: n.id for n in copy().graph.nodes}
    formats = {ids[name]: fmt for name, fmt in plan.formats.items()}
    coded = {ids[name]: found for name, found in plan.encodings.items()}
    low = {i: f for i, f in formats.items() if f is not Format.FP32}
    emulation = replace(emulation, encodings=coded)
    setting = setting_of_formats(low, emulation)
    return NativeEmulatorSession(copy=copy, emulation=emulation, setting=setting, formats=low)


@dataclass(slots=True)
class _Builder:
    model: Roundable
    roundings: GraphRoundings
    setting: Setting

    def build(self) -> Any:
        graph = self.model.graph
        for value in graph.values:
            if value.format is Format.FP32 and value.constant is None:
                self._round_value(value)
        for node in graph.float_nodes:
            for index in range(len(node.inputs)):
                self._round_constant(node, index)
            self._spoil_infinities(node)
        return self.model.finish()

    def _round_value(self, value: Value) -> None:
        roundings = self.roundings.value(value)
        exact = self.model.tensor(value.id)

        def rounding(base: Any, into: RoundTo) -> Any:
            return self.model.rounded(base, self.roundings.conversion(value, into))

        views = RoundedViews(native=exact, rounding=rounding, fixed=self.setting)
        for use in uses_of(self.model.graph, value.id):
            at_port = None if use.node is None else roundings.ports.get((use.node, use.index))
            new = views.of(roundings.stored if at_port is None else at_port)
            if new is not exact:
                self.model.give(value.id, [use], new)

    def _round_constant(self, node: Node, index: int) -> None:
        source = node.inputs[index]
        value = None if source is None else self.model.graph.values[source]
        if value is None or value.constant is None:
            return
        roundings = self.roundings.constant(node, index)
        if not any(self.setting.on(bits) for bits in roundings.values()):
            return

        def rounding(base: NDArray[np.float32], into: RoundTo) -> NDArray[np.float32]:
            return convert(base, self.roundings.conversion(value, into))

        exact = value.constant.read().astype(np.float32)
        views = RoundedViews(native=exact, rounding=rounding, fixed=self.setting)
        use = Use(node=node.id, index=index)
        self.model.give(value.id, [use], self.model.constant(views.of(roundings)))

    def _spoil_infinities(self, node: Node) -> None:
        """Have a transpose by product turn vectors with Inf to NaN, or clamp the Inf."""
        if not self.roundings.spoils_infinities(node) or not self.setting.relayout:
            return
        emulation = self.roundings.emulation
        top = emulation.format.max if emulation.saturate_infinity else None
        source = node.inputs[0]
        assert source is not None
        given = self.model.without_infinities(self.model.read_at(node.id, 0), top)
        self.model.give(source, [Use(node=node.id, index=0)], given)
