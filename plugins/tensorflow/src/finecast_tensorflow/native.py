"""A SavedModel or a Keras model, opened in TensorFlow; a converted one as a function."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, cast

from finecast import Plan, Policy, Scope
from finecast.api import Destination
from finecast.errors import UsageError
from finecast.files import check_writable_folder, digest, staging
from finecast.frontends import KERAS_SUFFIX, NativeModel, PreparedModel, load_keras
from finecast.graph import Dim, Graph
from finecast.naming import kind_of
from finecast.native import (
    Built,
    EngineBuilt,
    EngineModel,
    Verified,
    VerifyOn,
    check_trust,
    check_written,
    verify,
)
from finecast.planning import Adjustment
from finecast.plugin import SAVED_MODELS
from finecast_tensorflow import frontend
from finecast_tensorflow.frontend import (
    FrozenModel,
    TensorFlowApplied,
    TensorFlowFile,
    TensorFlowPrepared,
    capture,
)
from finecast_tensorflow.frontend.library import tf
from finecast_tensorflow.frontend.loading import GRAPH_FILE, callable_of, load, of_keras, save
from finecast_tensorflow.frontend.regions import unopened

_DIGITS: Final = 16


def read(path: Path, *, trust: bool = False) -> TensorFlowModel:
    """Open the function that a SavedModel serves, or the Keras model in a ``.keras`` file.

    Code in a ``.keras`` file runs only with ``trust``; a SavedModel has no code.

    Raises:
        UsageError: If there is no model, or ``trust`` is given for a SavedModel.
        ModelError: If it cannot be read.
    """
    if path.suffix.lower() == KERAS_SUFFIX:
        model = of_keras(load_keras(tf.keras, path, trust=trust), str(path))
        return _of(model, digest(path), path)
    check_trust(path, trust=trust)
    model = load(path)
    parts = folder_files(path, leave_out=("fingerprint.pb",))
    return _of(model, digest(*parts), path)


def take(model: Any) -> TensorFlowModel:
    """Open a Keras model, a ``Function`` or a ``FrozenModel``.

    Raises:
        UsageError: If ``model`` is neither, or its inputs are not known.
    """
    if isinstance(model, FrozenModel):
        return of_frozen(model, "model")
    if isinstance(model, Function):
        return of_frozen(model.frozen, "model")
    if any(base.__name__ == "Session" for base in type(model).__mro__):
        raise UsageError(
            "a session of TensorFlow 1 is no model",
            fix="save it with tf.compat.v1.saved_model.simple_save, and give that folder",
        )
    if hasattr(model, "layers") and hasattr(model, "export"):
        return of_frozen(of_keras(model), model.name)
    raise UsageError(
        f"{kind_of(model)} is not a model that finecast converts",
        fix="give a Keras model, or the folder that tf.saved_model.save wrote",
    )


def of_frozen(model: FrozenModel, name: str) -> TensorFlowModel:
    """Open a model in memory."""
    content = model.graph.SerializeToString(deterministic=True)
    model_digest = hashlib.sha256(content).hexdigest()[:_DIGITS]
    return _of(model, model_digest, Path(f"{name}.keras"))


def _of(model: FrozenModel, model_digest: str, path: Path) -> TensorFlowModel:
    return TensorFlowModel(file=capture(model, model_digest, path=path))


@dataclass(slots=True, kw_only=True, repr=False)
class TensorFlowModel(EngineModel[TensorFlowFile, TensorFlowPrepared]):
    """A SavedModel or a Keras model, opened."""

    library: ClassVar[str] = "TensorFlow"
    engine: ClassVar[str] = "tensorflow"
    kind: ClassVar[str] = SAVED_MODELS
    fp32_fix: ClassVar[str] = "save the model in fp32 first"

    @property
    def input_shapes(self) -> Mapping[str, tuple[Dim, ...] | None]:
        """Declared shapes of the inputs."""
        return frontend.input_shapes(self.file.model)

    def roundable(self, policy: str, adjustments: Sequence[Adjustment] = ()) -> NativeModel:
        """A copy that rounds by pairs of casts, or by arithmetic."""
        del policy
        return frontend.roundable(self.file, adjustments)

    def _prepare(self, policy: Policy) -> TensorFlowPrepared:
        return frontend.prepare(self.file, policy)

    def _apply(self, plan: Plan, prepared: PreparedModel | None) -> TensorFlowApplied:
        del prepared
        return frontend.apply(self.file, plan)

    def given_back(self, built: Built | None) -> Function:
        """The model of a plan as a function of tensors, which can be saved."""
        plan = None if built is None else built.plan
        return Function(frozen=EngineModel.given_back(self, built), plan=plan)

    def _size_of(self, model: FrozenModel) -> int:
        return model.size_bytes

    def kept_notes(self, graph: Graph, policy: Policy) -> list[str]:
        """Notes on ops that keep their types, and on functions that are not read as bodies."""
        notes = EngineModel.kept_notes(self, graph, policy)
        inner = unopened(self.file.binding.regions)
        if inner and policy.scope is not Scope.NONE:
            listed = ", ".join(inner[:3]) + (", ..." if len(inner) > 3 else "")
            notes.append(f"functions keep their types inside ({len(inner)}): {listed}")
        return notes

    def check(self, output: Destination) -> None:
        """Raise UsageError unless a folder may be written to ``output``."""
        output.check_plain("SavedModels")
        if output.path is not None:
            check_writable_folder(output.path, GRAPH_FILE, force=output.force)

    def store(
        self, built: EngineBuilt, output: Destination, on: VerifyOn
    ) -> tuple[int, Verified]:
        """Write a SavedModel, once it was loaded and run; without a path run it in memory."""
        model = built.model
        if output.path is None:
            return model.size_bytes, verify(self, built, model, on)
        verified: list[Verified] = []

        def staged(folder: Path) -> None:
            save(model, folder)
            verified.append(verify(self, built, folder, on))

        publish(staged, output.path, force=output.force)
        return model.size_bytes, verified[0]


def publish(make: Callable[[Path], None], path: Path, *, force: bool) -> None:
    """Let ``make`` write a SavedModel into a folder beside ``path``, then move it there.

    Raises:
        UsageError: If it cannot be written there.
    """
    try:
        with staging(path.parent) as folder:
            staged = folder / path.name
            make(staged)
            check_writable_folder(path, GRAPH_FILE, force=force)
            publish_folder(staged, path)
    except OSError as error:
        raise UsageError(
            f"cannot write the output: {error.strerror}", where=str(path)
        ) from error


@dataclass(frozen=True, kw_only=True)
class Function:
    """A converted model: called with tensors or arrays, saved as a SavedModel.

    Attributes:
        frozen: The model, with variables as constants.
        plan: The plan that it was built from; None for the fp32 model.
    """

    frozen: FrozenModel = field(repr=False)
    plan: Plan | None = field(default=None, repr=False)

    @cached_property
    def _call(self) -> Any:
        return callable_of(self.frozen)

    @property
    def graph_def(self) -> Any:
        """The graph, with its weights as constants."""
        return self.frozen.graph

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs, in the order of positional arguments."""
        return [p.name for p in self.frozen.inputs]

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs."""
        return [p.name for p in self.frozen.outputs]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The output; several as a dict by name, or as a list if the original model gives one.

        Inputs are cast to the types that the model declares, as Keras does.

        Raises:
            UsageError: If an input is missing or unknown, or of another shape.
        """
        by_name = {**self._by_name(inputs), **named}
        if sorted(by_name) != sorted(self.input_names):
            raise UsageError(
                f"inputs {', '.join(map(repr, by_name)) or 'none'} were given",
                fix=f"give {', '.join(self.input_names)}",
            )
        specs = zip(self.input_names, self._call.inputs, strict=True)
        ordered = [_as_declared(name, by_name[name], tensor) for name, tensor in specs]
        outputs = dict(zip(self.output_names, self._call(*ordered), strict=True))
        if len(outputs) == 1:
            return next(iter(outputs.values()))
        return list(outputs.values()) if self.frozen.listed else outputs

    def _by_name(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Positional arguments by input name: a mapping, one list of all, or in order."""
        names = self.input_names
        first = inputs[0] if len(inputs) == 1 else inputs
        if isinstance(first, Mapping):
            return dict(cast("Mapping[str, Any]", first))
        several = len(names) > 1 and isinstance(first, (list, tuple))
        ordered: Sequence[Any] = first if several else inputs
        if len(ordered) > len(names):
            raise UsageError(
                f"{len(ordered)} inputs were given, and the model has {len(names)}",
                fix=f"give {', '.join(names)}",
            )
        return dict(zip(names, ordered, strict=False))

    def save(self, folder: str | Path, *, force: bool = False) -> None:
        """Write a SavedModel.

        Raises:
            UsageError: If ``folder`` exists, without ``force`` or as no SavedModel, or its
                name has the suffix of a file.
        """
        path = Path(folder)
        check_written(__name__, path)
        check_writable_folder(path, GRAPH_FILE, force=force)
        publish(lambda staged: save(self.frozen, staged), path, force=force)


def _as_declared(name: str, given: Any, declared: Any) -> Any:
    """An input in the type that the model declares.

    Raises:
        UsageError: If it is of another shape.
    """
    tensor = tf.cast(given, declared.dtype)
    if not declared.shape.is_compatible_with(tensor.shape):
        raise UsageError(
            f"input {name!r} has shape {tensor.shape}, expected {declared.shape}",
            fix="give it as the original model takes it",
        )
    return tensor


def publish_folder(staged: Path, path: Path) -> None:
    """Rename a finished folder to ``path``; what was there is put back if that fails.

    ``staged`` lies in a temporary folder beside ``path``. What was at ``path`` is moved into
    that temporary folder, to be deleted with it.

    Raises:
        OSError: If it cannot be renamed.
    """
    before = staged.with_name(f"{staged.name}.before")
    if path.exists():
        path.replace(before)
    try:
        staged.replace(path)
    except OSError:
        if before.exists():
            before.replace(path)
        raise


def folder_files(folder: Path, *, leave_out: Sequence[str] = ()) -> list[Path]:
    """All files in a folder, in the order of their names."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name not in leave_out)
    return sorted(files)
