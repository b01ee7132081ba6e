"""Decoding a text token by token, with what the model remembers carried from call to call.

A decoder that is given all of a text at once computes every position in one call. As it is
used, it is given the beginning (the prefill), and then one token a call (the steps) with the
keys and values of the calls before. What a low cache loses shows in the steps only.

Laws: the texts are the data's, never what the model generated (teacher forcing), so two models
see the same tokens; the metric is of the steps. With exact arithmetic the steps give what one
call on the whole text gives at these positions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, final

import numpy as np

from finecast.data.sizes import CACHED, WHOLE, input_specs
from finecast.devices.kv_cache import BEAM_INPUT
from finecast.engines.base import DTYPES, Array, Feeds, Session, Steps, TensorSpec
from finecast.errors import UsageError
from finecast.graph import Graph
from finecast.naming import listed, unknown_name
from finecast.rules.policy import Policy

_POSITIONS: Final = 1
"""The axis of positions in tokens, masks and logits, after that of the texts."""
_MOST_NAMED: Final = 4
"""Inputs that a message names."""
_STEMS: Final = re.compile(r"^(past|present)(_key_values)?[._]?", re.IGNORECASE)
"""What differs between the name of a cache that is read and of the one that is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How texts are decoded.

    Attributes:
        steps: Tokens at the end of each text that are given one a call.
        state: The output that becomes an input in the next call, by the input's name; empty
            for a model that keeps its state by itself.
        inputs: The other inputs, which the data has.
        initial: The inputs that carry state.
    """

    steps: int
    state: Mapping[str, str]
    inputs: tuple[TensorSpec, ...]
    initial: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, session: Session, steps: int, patterns: Mapping[str, str]) -> Decoding:
        """How to decode with a loaded model.

        Args:
            session: The model.
            steps: Tokens that are given one a call.
            patterns: Names of outputs by names of inputs, where ``*`` stands for any text, the
                same in both. Without any, inputs called ``past`` are joined with outputs
                called ``present``.

        Raises:
            UsageError: If a pattern matches nothing, or no state is found.
        """
        inputs, outputs = session.inputs, [spec.name for spec in session.outputs]
        if patterns and session.keeps_state:
            raise UsageError(
                "the model keeps its state itself from call to call",
                where="--state",
                fix="leave it out",
            )
        if patterns:
            state = _matched(patterns, [spec.name for spec in inputs], outputs)
        else:
            state = {} if session.keeps_state else found_state(inputs, session.outputs)
        return cls(
            steps=steps,
            state=state,
            inputs=tuple(s for s in inputs if s.name not in state and s.name != BEAM_INPUT),
            initial=tuple(s for s in inputs if s.name in state),
        )

    def advice(self) -> dict[str, str]:
        """What to do about arrays that are there or missing, by the inputs' names.

        An input is taken for a state that was left out if it has the type and the number of
        axes of one that is carried.
        """
        kinds = {(s.dtype, len(s.shape or ())) for s in self.initial}
        left = [s.name for s in self.inputs if (s.dtype, len(s.shape or ())) in kinds]
        omission = (
            f"--state leaves out {listed(left, _MOST_NAMED)}: say which output each becomes"
        )
        carried = "leave it out: with --decode-steps each call is given the state of the last"
        return dict.fromkeys(left, omission) | dict.fromkeys(self.state, carried)

    def outputs(self, session: Session) -> tuple[TensorSpec, ...]:
        """The outputs that are no state."""
        carried = set(self.state.values())
        return tuple(spec for spec in session.outputs if spec.name not in carried)

    def labels(self, labels: Array | None, feeds: Feeds) -> Array | None:
        """The labels of the steps, of labels for each position; one a text as it is.

        Raises:
            UsageError: If labels are neither of all positions of the texts nor of the steps.
        """
        if labels is None or labels.ndim <= _POSITIONS:
            return labels
        positions, length = labels.shape[_POSITIONS], self._length(feeds)
        if positions not in (self.steps, length):
            raise UsageError(
                f"the labels have {positions} positions, and the texts {length}",
                where="labels",
                fix=f"give a label for each of the {length} positions, or for each of the last"
                f" {self.steps}, which are decoded one by one",
            )
        return labels[:, -self.steps :]

    def whole(self, feeds: Feeds, first: int | None = None) -> list[Feeds]:
        """The calls that decode whole texts, without their state.

        Args:
            feeds: The texts, each of all positions.
            first: Positions of the first call; by default all but the steps.

        Raises:
            UsageError: If the texts have no more positions than there are steps.
        """
        length = self._length(feeds)
        first = length - self.steps if first is None else first
        if length <= self.steps:
            raise UsageError(
                f"the texts have {length} positions, and {self.steps} are decoded one by one",
                where="--decode-steps",
                fix=f"give less than {length}: the first call has at least one position",
            )
        ends = pairwise([0, *range(first, length + 1)])
        return [self._cut(feeds, start, end) for start, end in ends]

    def walk(
        self, session: Session, calls: Sequence[Feeds]
    ) -> Iterator[tuple[Feeds, dict[str, Array]]]:
        """Each call with its state, and the model's outputs."""
        if not self.state:
            session.reset()
            for call in calls:
                fed = self._with_beams(call, session)
                yield fed, session.step(fed)
            return
        state = self._empty(calls[0])
        for call in calls:
            fed = {**call, **state}
            outputs = session.run(fed)
            yield fed, outputs
            state = {name: outputs[output] for name, output in self.state.items()}

    def phases(self, session: Session, feeds: Feeds) -> tuple[Feeds, ...]:
        """The feeds of a first call and of the last step, as the fp32 model has them.

        The cache of the last step is that of one call on all positions before it. Where the
        model keeps its state, that call comes first, untimed.
        """
        last = self.whole(feeds, self._length(feeds) - 1)
        first = self.whole(feeds)[0]
        if not self.state:
            steps = Steps([self._with_beams(one, session) for one in last], untimed=1)
            return self._with_beams(first, session), steps
        *_, (step, _) = self.walk(session, last)
        return {**first, **self._empty(first)}, step

    def _length(self, feeds: Feeds) -> int:
        """The positions of the texts."""
        for spec in self.inputs:
            array = feeds[spec.name]
            if array.ndim > _POSITIONS and not _covers_cache(spec):
                return array.shape[_POSITIONS]
        names = ", ".join(spec.name for spec in self.inputs) or "none"
        raise UsageError(
            f"no input has positions along its second axis: {names}",
            where="--decode-steps",
            fix="decode in an --eval function of your own",
        )

    def _cut(self, feeds: Feeds, start: int, end: int) -> Feeds:
        """The positions from ``start`` to ``end``; a mask has those before, too."""
        cut_feeds: dict[str, Array] = {}
        for spec in self.inputs:
            array = feeds[spec.name]
            if array.ndim > _POSITIONS:
                array = array[:, 0 if _covers_cache(spec) else start : end]
            cut_feeds[spec.name] = np.ascontiguousarray(array)
        return cut_feeds

    def _empty(self, call: Feeds) -> dict[str, Array]:
        """The state before the first call: of no position, or zeros of a fixed size."""
        texts = {s.shape[0] for s in self.inputs if s.shape}
        rows = next(len(a) for a in call.values() if a.ndim)

        def size(axis: int, dim: int | str | None) -> int:
            if isinstance(dim, int):
                return dim
            return rows if axis == 0 or (dim and dim in texts) else 0

        return {
            spec.name: np.zeros(
                [size(axis, dim) for axis, dim in enumerate(spec.shape or ())],
                DTYPES[spec.dtype],
            )
            for spec in self.initial
        }

    def _with_beams(self, call: Feeds, session: Session) -> Feeds:
        """A call of a stateful model, with its texts in their own order."""
        beams = next((s for s in session.inputs if s.name == BEAM_INPUT), None)
        if beams is None:
            return call
        rows = next(len(a) for a in call.values() if a.ndim)
        return {**call, BEAM_INPUT: np.arange(rows, dtype=DTYPES[beams.dtype])}


@final
class DecodingSession(Session):
    """A model that is given whole texts, decodes them, and gives the outputs of the steps.

    An output without positions is that of the last step.
    """

    def __init__(self, session: Session, decoding: Decoding) -> None:
        self.session, self._decoding = session, decoding
        self.inputs, self.outputs = decoding.inputs, decoding.outputs(session)

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Decode; outputs by name, with the steps along the second axis."""
        names = [spec.name for spec in self.outputs]
        calls = self._decoding.whole(feeds)
        steps = [
            {name: outputs[name] for name in names}
            for _, outputs in self._decoding.walk(self.session, calls)
        ][1:]
        return {name: _along_positions([one[name] for one in steps]) for name in names}


def _along_positions(arrays: Sequence[Array]) -> Array:
    if arrays[0].ndim > _POSITIONS and arrays[0].shape[_POSITIONS] == 1:
        return np.concatenate(arrays, axis=_POSITIONS)
    return arrays[-1]


def _covers_cache(spec: TensorSpec) -> bool:
    """Whether an input has the cached positions, too, as a mask has."""
    dims = (spec.shape or ())[_POSITIONS : _POSITIONS + 1]
    text = " ".join([spec.name, *(dim for dim in dims if isinstance(dim, str))])
    return bool(WHOLE.search(text) or CACHED.search(text))


def state_of(graph: Graph, policy: Policy) -> Mapping[str, str]:
    """The state whose type ``policy`` has plans decide: outputs by inputs.

    Raises:
        UsageError: If there is none.
    """
    if not policy.io_state or policy.state:
        return policy.state
    outputs = [TensorSpec(name=v.name, dtype=v.dtype, shape=v.shape) for v in graph.outputs]
    return found_state(input_specs(graph), outputs, where="--io state")


def found_state(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    where: str = "--decode-steps",
) -> dict[str, str]:
    """The state by names and shapes: the output of each input that is called a past.

    Raises:
        UsageError: If there is none, or an input of that name has no output; names ``where``.
    """
    state = _joined(inputs, outputs)
    lost = [s.name for s in inputs if _STEMS.match(s.name) and s.name not in state]
    if lost or not state:
        names = ", ".join(spec.name for spec in outputs)
        fixes = [
            *([] if lost else ["leave it out"]),
            f"say which does by --state 'INPUT=OUTPUT'; the outputs are {names}",
        ]
        possible = lost or any(_alike(read, output) for read in inputs for output in outputs)
        raise UsageError(
            f"no output becomes the input {lost[0]!r} of the next call"
            if lost
            else "no input is called a past, so no state passes from call to call",
            where=where,
            fix=", or ".join(fixes if possible else fixes[:1]),
        )
    return state


def _joined(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> dict[str, str]:
    """The output that is called as each input that is called a past."""
    by_stem = {_STEMS.sub("", spec.name): spec for spec in outputs if _STEMS.match(spec.name)}
    state: dict[str, str] = {}
    for spec in inputs:
        output = by_stem.get(_STEMS.sub("", spec.name))
        if _STEMS.match(spec.name) and output is not None and _alike(spec, output):
            state[spec.name] = output.name
    return state


def advice_on_whole(session: Session) -> dict[str, str]:
    """What to do about inputs that are missing where samples are given whole, by name."""
    state = [*_joined(session.inputs, session.outputs)]
    return dict.fromkeys(
        [*state, BEAM_INPUT],
        "give --decode-steps N, which passes the state on from call to call, or the array,"
        " which may be empty",
    )


def _alike(read: TensorSpec, made: TensorSpec) -> bool:
    """Whether shapes may be the same but for the positions, which are free in both."""
    if read.dtype != made.dtype or read.shape is None or made.shape is None:
        return read.dtype == made.dtype
    return len(read.shape) == len(made.shape) and all(
        a == b or not (isinstance(a, int) and isinstance(b, int))
        for a, b in zip(read.shape, made.shape, strict=True)
    )


def _matched(
    patterns: Mapping[str, str], inputs: Sequence[str], outputs: Sequence[str]
) -> dict[str, str]:
    """The output of each input that a pattern matches."""
    state: dict[str, str] = {}
    for pattern, output in patterns.items():
        glob = re.compile("(.*)".join(map(re.escape, pattern.split("*"))))
        matches = [m for name in inputs if (m := glob.fullmatch(name))]
        if not matches:
            raise unknown_name(pattern, inputs, what="input", where="--state")
        for match in matches:
            texts = iter(match.groups())
            name = re.sub(r"\*", lambda _, t=texts: next(t, ""), output)
            if name not in outputs:
                raise unknown_name(name, outputs, what="output", where="--state")
            state[match.group()] = name
    return state
