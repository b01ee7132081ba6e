"""Exact numbers: sessions that compute them, and the fp32 model's outputs to compare with."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, final

from finecast.engines import get_engine
from finecast.engines.base import (
    Array,
    Engine,
    Feeds,
    KernelTime,
    Loadable,
    Session,
    calls_of,
    joined_outputs,
    outputs_on,
)
from finecast.errors import EngineError, FinecastError, naming
from finecast.files.staging import Stage, staging
from finecast.frontends import onnx as frontend
from finecast.frontends.dry_run import MOST_BYTES
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
    def told(self) -> tuple[str, ...]:
        """Names of the outputs that errors are told of."""
        return tuple(self.names[number] for number in sorted(self.counted))

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


_KEPT_BYTES: Final = 256 << 20


@final
class CachedSession(Session):
    """``session``, run once on each feeds, which start with an empty state.

    Law: ``run`` gives what the session gives; outputs beyond ``limit`` bytes are not cached.
    """

    def __init__(self, session: Session, *, limit: int = _KEPT_BYTES) -> None:
        self.session = session
        self.inputs, self.outputs = session.inputs, session.outputs
        self._left = limit
        self._known: dict[bytes, dict[str, Array]] = {}

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Outputs by name, in arrays that the caller may change."""
        key = feeds_digest(feeds)
        if key not in self._known:
            outputs = self.session.run(feeds)
            size = sum(a.nbytes for a in outputs.values())
            if size > self._left or any(a.dtype.hasobject for a in outputs.values()):
                return outputs
            self._left -= size
            self._known[key] = outputs
        return {name: array.copy() for name, array in self._known[key].items()}

    @property
    def keeps_state(self) -> bool:
        """Whether the session's model does."""
        return self.session.keeps_state

    def reset(self) -> None:
        """Empty the state of the session, if its model has one."""
        self.session.reset()

    def step(self, feeds: Feeds) -> dict[str, Array]:
        """The session's, never cached: it may depend on the steps before."""
        return self.session.step(feeds) if self.keeps_state else self.run(feeds)

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        """The session's."""
        return self.session.profile(feeds, repeats=repeats)


def feeds_digest(feeds: Feeds) -> bytes:
    """Identifies names, types, shapes and numbers of feeds."""
    state = hashlib.blake2b(digest_size=16)
    for call in calls_of(feeds):
        state.update(b"call;")
        for name, array in sorted(call.items()):
            state.update(f"{name}:{array.dtype}:{array.shape};".encode())
            if array.dtype.hasobject:
                state.update(repr(array.tolist()).encode())
            else:
                state.update(array.tobytes())
    return state.digest()


# ------------------------------------------------------------------ sessions for exact numbers

_OWN: Final = {
    "openvino": "openvino",
    "finecast.frontends.tensorflow": "tensorflow",
    "finecast.frontends.torch": "torch",
}
"""Engines by the package that defines the models of their own library."""

T = TypeVar("T")


def is_onnx(model: Any) -> bool:
    """Whether a model is ONNX's, and not of an engine's own library."""
    return type(model).__module__.partition(".")[0] == "onnx_ir"


def exact_session(model: Any, *, optimizing: bool = True) -> Session:
    """A session of a model in memory that computes exactly in fp32; not for timing.

    ONNX models run in ``exact_engine``, models of an engine's own library in that engine:
    instrumented OpenVINO models round by arithmetic in fp32.

    Raises:
        EngineError: If it cannot be run. If its ops are not in fp32, says what to do.
    """
    if is_onnx(model):
        try:
            return load_model(exact_engine(optimizing=optimizing), model)
        except EngineError as error:
            taken = _taken_from(model)
            if not taken:
                raise
            first = f"take the model to fp32 first: --from-type {taken}"
            raise EngineError(error.what, where=error.where, fix=first) from error
    home = type(model).__module__
    return get_engine(next(e for at, e in _OWN.items() if home.startswith(at))).load(model)


def _taken_from(model: Any) -> str:
    """The type from which ``model`` can be taken to fp32, if it can be loaded then; else "".

    An engine may refuse an op for another reason than its type: a weight of 3 bits, say.
    """
    given = frontend.types_computed_in(model)
    label = next((name for name, t in frontend.SOURCE_TYPES.items() if t in given), "")
    if not label:
        return ""
    try:
        taken = frontend.take_to_fp32(frontend.from_model(model), label)
        load_model(exact_engine(), taken.model)
    except FinecastError:
        return ""
    return label


def exact_engine(*, optimizing: bool = True) -> Engine:
    """An engine that computes ONNX models exactly in fp32; not for timing.

    The time of its graph optimization grows with the square of the number of nodes. It gains
    nothing where most values are model outputs.
    """
    from finecast.engines.onnxruntime import OnnxRuntimeEngine

    return OnnxRuntimeEngine("CPU", spinning=False, optimizing=optimizing, fusing_codes=False)


def load_model(engine: Engine, model: Any, *, profiling: bool = False) -> Session:
    """Load a model that is in memory.

    Raises:
        EngineError: If the engine cannot run the model.
    """
    if not profiling:
        return from_memory(model, engine.load)
    stage = Stage()
    session = from_memory(model, partial(engine.load, profiling=True), stage.folder)
    # ONNX Runtime opens the file again for each profile.
    weakref.finalize(session, _drop, stage)
    return session


def _drop(stage: Stage) -> None:
    """Hold ``stage`` until this is called."""
    del stage


def from_memory(model: Any, load: Callable[[Loadable], T], place: Path | None = None) -> T:
    """Call ``load`` with a model in memory, in a form that engines load.

    An ONNX model is passed as bytes; as a temporary file if it is too large to be sent to the
    process of dry runs, or has external data, which bytes cannot refer to. The file stays in
    ``place``; without one it is deleted on return: engines have read or mapped it by then.
    Other models are passed as they are.

    Raises:
        EngineError: If the engine cannot run the model.
    """
    if not is_onnx(model):
        return load(model)
    if frontend.fits_one_message(model, MOST_BYTES) and not frontend.came_external(model):
        return load(frontend.to_bytes(model))
    with staging() if place is None else nullcontext(place) as folder:
        path = folder / "model.onnx"
        frontend.save(model, path)
        with naming(path, "the model in memory"):
            return load(path)
