"""A TensorFlow model as a function that can be called and saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from finecast.errors import UsageError
from finecast.files import check_writable_folder
from finecast.frontends.tensorflow import FrozenModel
from finecast.frontends.tensorflow.library import tf
from finecast.frontends.tensorflow.loading import GRAPH_FILE
from finecast.frontends.tensorflow.saving import callable_of, save
from finecast.planning.plan import Plan


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
        found = dict(zip(self.output_names, self._call(*ordered), strict=True))
        if len(found) == 1:
            return next(iter(found.values()))
        return list(found.values()) if self.frozen.listed else found

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
        from finecast.native.opening import check_written
        from finecast.native.tensorflow import model

        path = Path(folder)
        check_written(model.__name__, path)
        check_writable_folder(path, GRAPH_FILE, force=force)
        model.publish(lambda staged: save(self.frozen, staged), path, force=force)


def _as_declared(name: str, given: Any, declared: Any) -> Any:
    """An input in the type that the model declares.

    Raises:
        UsageError: If it is of another shape.
    """
    found = tf.cast(given, declared.dtype)
    if not declared.shape.is_compatible_with(found.shape):
        raise UsageError(
            f"input {name!r} has shape {found.shape}, expected {declared.shape}",
            fix="give it as the original model takes it",
        )
    return found
