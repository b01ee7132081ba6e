"""A model of any library run as a device would: its copy, and a session of that.

The copy computes in fp32, rounded as ``roundings`` and its switch input say. The bits of a
node say whether it reads rounded operands and parameters, and whether it stores its result
rounded. Bits that always act together share one element of the switch input, so that the
graph needs no logic of its own; large constants are inputs, fed exact or rounded. With a fixed
setting there is no switch and nothing is selected.

Laws: with every bit off the copy computes what the model computes (but for what the device
does to fp32 itself); rounding a value for one reader leaves it exact for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from finecast.devices.emulation import (
    ALWAYS,
    RELAYOUT,
    Bit,
    Emulation,
    Setting,
    device_kernels,
    kernel_numbers,
    setting_of_plan,
)
from finecast.engines.base import (
    Array,
    Feeds,
    Session,
    UnorderedError,
    each_call,
    feeds_for,
)
from finecast.engines.emulator.in_parts import PartsSession
from finecast.engines.emulator.roundings import GraphRoundings, RoundedViews, RoundTo
from finecast.engines.emulator.sums import Summing
from finecast.engines.loading import exact_session
from finecast.errors import UsageError
from finecast.frontends.native_model import OFFSET, NativeModel, uses_of
from finecast.frontends.onnx.parts import ModelInParts
from finecast.graph import Node, Value
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounding, convert
from finecast.numbers.summation import Order
from finecast.planning.edits import Use
from finecast.planning.plan import Plan
from finecast.planning.points import SWITCH

# Elements from which on a constant is fed: a choice in the graph would copy it.
_FED_SIZE: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SwitchedWeight:
    """A constant that the instrumented model has as an input, fed exact or rounded.

    It is rounded where a setting has any of ``bits``.
    """

    name: str
    exact: NDArray[np.float32]
    rounded: NDArray[np.float32]
    bits: frozenset[Bit]


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """The instrumented model; ``conditions[k]`` are the bits of element k of its switch.

    ``summed`` is the number of ops that add up in a chosen order.
    """

    model: Any
    conditions: tuple[frozenset[Bit], ...]
    weights: tuple[SwitchedWeight, ...] = ()
    summed: int = 0

    def feeds(self, setting: Setting) -> dict[str, NDArray[np.generic]]:
        """Arrays for the switch and the constants that are inputs, under a setting."""
        arrays: dict[str, NDArray[np.generic]] = {
            w.name: w.rounded if setting.on(w.bits) else w.exact for w in self.weights
        }
        if self.conditions:
            arrays[SWITCH] = np.array([setting.on(bits) for bits in self.conditions], bool)
        return arrays


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Instruments a copy of a model, which is changed.

    Attributes:
        model: The copy, whose values are in fp32.
        roundings: What the device rounds. The scope of its emulation does not count: the
            setting says what is cast.
        fixed: The setting to build for, without a switch; None for any.
        summing: For a fixed setting, the order in which ops add up, which may change later;
            None for that of the engine.
    """

    model: NativeModel
    roundings: GraphRoundings
    fixed: Setting | None
    summing: Summing | None
    conditions: dict[frozenset[Bit], int] = field(default_factory=dict[frozenset[Bit], int])
    weights: list[SwitchedWeight] = field(default_factory=list[SwitchedWeight])
    constants: dict[tuple[object, ...], Any] = field(
        default_factory=dict[tuple[object, ...], Any]
    )

    def build(self) -> Emulated:
        graph = self.model.graph
        for value in graph.values:
            if value.format is Format.FP32 and value.constant is None:
                self._round_value(value)
        for node in graph.float_nodes:
            for index in range(len(node.inputs)):
                self._round_constant(node, index)
            self._round_numbers(node)
            self._spoil_infinities(node)
        summed = sum(map(self._sum_in_order, graph.float_nodes))
        return Emulated(
            model=self.model.finish(len(self.conditions)),
            conditions=tuple(self.conditions),
            weights=tuple(self.weights),
            summed=summed,
        )

    def _chosen(self, bits: frozenset[Bit], on: Any, off: Any) -> Any:
        """``on`` where any of ``bits`` is set, else ``off``."""
        k = self.conditions.setdefault(bits, len(self.conditions))
        return self.model.switched(k, on, off)

    def _round_value(self, value: Value) -> None:
        roundings = self.roundings.value(value)
        exact = self.model.tensor(value.id)

        def rounding(base: Any, into: RoundTo) -> Any:
            return self.model.rounded(base, self.roundings.conversion(value, into))

        views = RoundedViews(
            native=exact, rounding=rounding, choice=self._chosen, fixed=self.fixed
        )
        for use in uses_of(self.model.graph, value.id):
            at_port = None if use.node is None else roundings.ports.get((use.node, use.index))
            new = views.of(roundings.stored if at_port is None else at_port)
            if new is not exact:
                self.model.give(value.id, [use], new)

    def _round_constant(self, node: Node, index: int) -> None:
        """Have ``node`` read a rounded constant: rounded here, from the exact numbers."""
        source = node.inputs[index]
        value = None if source is None else self.model.graph.values[source]
        if value is None or value.constant is None:
            return
        roundings = {
            into: bits
            for into, bits in self.roundings.constant(node, index).items()
            if self.fixed is None or self.fixed.on(bits)
        }
        if not roundings:
            return
        exact = uncast = value.constant.read().astype(np.float32)
        for into, bits in roundings.items():
            rounded = convert(exact, self.roundings.conversion(value, into))
            switched = self.fixed is None and ALWAYS not in bits
            if switched and exact.size >= _FED_SIZE:
                low = self._fed(uncast, rounded, value.name, bits)
            else:
                uncast = rounded
                # With an encoding readers may have other axes and scales.
                key = (value.id, into, None if into.encoding is None else (node.id, index))
                if key not in self.constants:
                    self.constants[key] = self.model.constant(rounded)
                low = self.constants[key]
                if switched:
                    low = self._chosen(bits, low, self.model.read_at(node.id, index))
            self.model.give(value.id, [Use(node=node.id, index=index)], low)

    def _round_numbers(self, node: Node) -> None:
        """Round numbers that are operands of ``node`` by the last rounding that is done."""
        setting = self.fixed
        if setting is None:
            return
        roundings = self.roundings.scalars(node).items()
        done = [into for into, bits in roundings if setting.on(bits)]
        for into in done[-1:]:
            how = self.roundings.emulation.conversion(into.format, flush=into.flush)
            self.model.round_numbers(node.id, how)

    def _fed(
        self,
        exact: NDArray[np.float32],
        rounded: NDArray[np.float32],
        name: str,
        bits: frozenset[Bit],
    ) -> Any:
        """A new input of the model that is fed one of the two arrays, without a copy."""
        key = f"{name}_fed_{len(self.weights)}"
        self.weights.append(SwitchedWeight(name=key, exact=exact, rounded=rounded, bits=bits))
        return self.model.add_input(key, exact.shape)

    def _sum_in_order(self, node: Node) -> bool:
        """Have numpy add up what ``node`` sums, in the order asked for, if it can."""
        if self.summing is None or self.fixed is None:
            return False
        summed = self.roundings.summed_op(node, self.fixed, self.summing)
        if summed is not None:
            self.model.compute(node.id, summed)
        return summed is not None

    def _spoil_infinities(self, node: Node) -> None:
        """Have a transpose by product turn vectors with Inf to NaN, or clamp the Inf.

        The product with the identity multiplies Inf by the identity's zeros.
        """
        if not self.roundings.spoils_infinities(node):
            return
        if self.fixed is not None and not self.fixed.relayout:
            return
        emulation = self.roundings.emulation
        # To the largest number of the low format, so that a cast of it stays finite.
        top = emulation.format.max if emulation.saturate_infinity else None
        read = self.model.read_at(node.id, 0)
        spoiled = _without_infinities(self.model.op, read, top)
        if self.fixed is None:
            spoiled = self._chosen(frozenset({RELAYOUT}), spoiled, read)
        source = node.inputs[0]
        assert source is not None
        self.model.give(source, [Use(node=node.id, index=0)], spoiled)


def _without_infinities(op: Callable[..., Any], x: Any, top: float | None) -> Any:
    """``x`` with each Inf replaced by ``top`` of its sign.

    If ``top`` is None, by what a product with an identity matrix gives: NaN in every element
    of the last axis that has an Inf.
    """
    if top is not None:
        return op("select", op("is_inf", x), op("clamp", x, min_value=-top, max_value=top), x)
    total = op("reduce_sum", op("multiply", x, 0.0), [-1], keep_dims=True)
    return op("add", x, total)


def check_emulation(emulation: Emulation, library: str) -> None:
    """Raise UsageError for options that are emulated for ONNX models alone."""
    refused = {
        "stochastic rounding": emulation.rounding is not Rounding.NEAREST_EVEN,
        "accumulation in the format itself": not emulation.mixed_accumulation,
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
class EmulatorSession(Session):
    """A model as a device computes it; ``apply`` changes which nodes are cast.

    Law: with stochastic rounding, draws depend on the index of the sample since ``apply`` or
    ``restart``, not on how samples were split into batches. The time that emulation takes says
    nothing of the device: there is no profile.

    Attributes:
        copy: Makes a copy of the model.
        emulation: The target and its options.
        setting: What is cast.
        formats: Formats, by node id, of nodes cast to another one than ``emulation.format``.
        low: Low formats in which the model itself stores values, by value id.
        kernels: Nodes that run as one; None for those of ``device_kernels``.
        switched: Whether one model serves all settings, by an extra input. Else one is built
            for each, which runs faster.
        summed: The number of ops that add up in the order that the emulation states.
    """

    copy: Callable[[], NativeModel]
    emulation: Emulation
    setting: Setting
    formats: Mapping[int, Format] = field(default_factory=dict[int, Format])
    low: Mapping[int, Format] = field(default_factory=dict[int, Format])
    kernels: Sequence[frozenset[int]] | None = None
    switched: bool = False
    summed: int = field(default=0, init=False)
    _emulated: Emulated | None = field(default=None, init=False)
    _session: Session = field(init=False)
    _own: Mapping[str, Array] = field(init=False)
    _seen: int = field(default=0, init=False)
    _summing: Summing | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Build the model for the setting."""
        self.apply(self.setting)

    def apply(self, setting: Setting) -> EmulatorSession:
        """Cast what ``setting`` says from now on; the stream of samples starts anew."""
        fits = self.switched or setting == self.setting
        self.setting = setting
        if self._emulated is None or not fits:
            self._emulated = self._built()
            self._session = _loaded(self._emulated.model)
            self.summed = self._emulated.summed
            # A joined model has a switch of its own, which its caller feeds.
            own = {SWITCH} if self._emulated.conditions else set[str]()
            fed = {OFFSET, *own, *(w.name for w in self._emulated.weights)}
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
        order = self.emulation.order
        if order is not None and not model.computes:
            raise UnorderedError(
                f"orders of summation are not emulated for {model.library} models",
                where=f"--target {self.emulation.target.name}",
                fix="name the device without a share, or give the model as ONNX",
            )
        self._summing = None if order is None else Summing(order=order)
        return _Builder(
            model=model,
            roundings=roundings,
            fixed=None if self.switched else self.setting,
            summing=self._summing,
        ).build()

    def in_order(self, order: Order) -> EmulatorSession:
        """Add up in another order from now on; the emulation has to state one already."""
        assert self._summing is not None
        self._summing.order = order
        return self.restart()

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
        return feeds_for(self._session, each_call(feeds, lambda call: {**call, **own}))

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


def _loaded(model: Any) -> Session:
    return PartsSession(model) if isinstance(model, ModelInParts) else exact_session(model)


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
    known = formats is not None and not plan.encodings
    ids = {} if known else {n.name: n.id for n in copy().graph.nodes}
    if formats is None:
        formats = {ids[name]: fmt for name, fmt in plan.formats.items()}
    lowered = {i: f for i, f in formats.items() if f is not Format.FP32}
    kinds = {*lowered.values()}
    emulation = replace(
        emulation,
        format=kinds.pop() if len(kinds) == 1 else emulation.format,
        encodings={
            ids[name]: encoding for name, encoding in plan.encodings.items() if name in ids
        },
    )
    return EmulatorSession(
        copy=copy,
        emulation=emulation,
        setting=setting_of_plan(lowered, emulation, fp32_parameters=fp32_parameters),
        formats=lowered,
        low=low or {},
    )
