"""An OpenVINO model, opened: each verb's work on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from finecast.engines.base import Session
from finecast.engines.loading import exact_session
from finecast.errors import FinecastError, UsageError, naming
from finecast.files import check_writable
from finecast.frontends import openvino as frontend
from finecast.frontends.keras_models import KERAS_SUFFIX
from finecast.frontends.native_model import NativeModel
from finecast.frontends.openvino import OvApplied, OvFile, OvPrepared
from finecast.frontends.openvino.model import IR_SUFFIX, ONNX_SUFFIX, WEIGHTS_SUFFIX
from finecast.frontends.prepared import PreparedModel
from finecast.graph import Dim
from finecast.native.artefact import Destination, Verified
from finecast.native.engine_model import EngineModel
from finecast.native.source import EngineBuilt, Source, VerifyOn, check_trust
from finecast.native.verifying import staged_model, verify
from finecast.planning.adjustments import Adjustment
from finecast.planning.plan import Plan
from finecast.plugin import IR
from finecast.rules.policy import Policy


def read(path: Path, *, trust: bool = False) -> OvModel:
    """Open the model in a file or folder that OpenVINO reads.

    Code in a ``.keras`` file runs only with ``trust``; other kinds have no code.

    Raises:
        UsageError: If ``trust`` is given where there is nothing to trust.
    """
    if path.suffix.lower() != KERAS_SUFFIX:
        check_trust(path, trust=trust)
    return OvModel(file=frontend.load(path, trust=trust))


def take(model: Any) -> OvModel:
    """Open an ``ov.Model``, a Keras model or an ``OvFile``."""
    if isinstance(model, OvFile):
        return OvModel(file=model)
    if hasattr(model, "layers") and hasattr(model, "export"):
        return OvModel(file=frontend.from_keras(model))
    return OvModel(file=frontend.from_model(model))


@dataclass(slots=True, kw_only=True, repr=False)
class OvModel(EngineModel[OvFile, OvPrepared]):
    """An OpenVINO model, opened."""

    library: ClassVar[str] = "OpenVINO"
    engine: ClassVar[str] = "openvino"
    kind: ClassVar[str] = IR
    fp32_fix: ClassVar[str] = "convert the model in fp32"

    @property
    def input_shapes(self) -> Mapping[str, tuple[Dim, ...] | None]:
        """Declared shapes of the inputs."""
        return frontend.input_shapes(self.file.model)

    def reference(self) -> Session:
        """The model in OpenVINO, in the types that it states, and under no hint."""
        return self.knowing_free(exact_session(frontend.stated_in_types(self.file)))

    @property
    def exported(self) -> Source:
        """The ONNX model that this one was read from, which other engines run, too."""
        if self.path.suffix.lower() != ONNX_SUFFIX or not self.path.is_file():
            return self
        from finecast.native import onnx

        with suppress(FinecastError):  # OpenVINO reads what ONNX's own library does not
            return onnx.read(self.path)
        return self

    def roundable(self, policy: str, adjustments: Sequence[Adjustment] = ()) -> NativeModel:
        """A copy that rounds by arithmetic."""
        return frontend.roundable(self.file, adjustments)

    def _prepare(self, policy: Policy) -> OvPrepared:
        return frontend.prepare(self.file, policy)

    def _apply(self, plan: Plan, prepared: PreparedModel | None) -> OvApplied:
        """Replay the plan on a copy, which shares the constants that stay."""
        return frontend.apply(self.file, plan)

    def _size_of(self, model: Any) -> int:
        return frontend.size_bytes(model)

    def check(self, output: Destination) -> None:
        """Raise UsageError unless both files of IR may be written to ``output``."""
        output.check_plain("OpenVINO models")
        output.check()
        if output.path is not None:
            if output.path.suffix != IR_SUFFIX:
                raise UsageError(
                    f"OpenVINO writes no IR whose name does not end in {IR_SUFFIX}",
                    where=str(output.path),
                    fix=f"name it {output.path.with_suffix(IR_SUFFIX)}",
                )
            check_writable(output.path.with_suffix(WEIGHTS_SUFFIX), force=output.force)

    def store(
        self, built: EngineBuilt, output: Destination, on: VerifyOn
    ) -> tuple[int, Verified]:
        """Write both files of IR, once the model was loaded and run.

        Neither of the two files is there without the other, and nothing half-written stays.
        """
        self.check(output)
        with staged_model(output, "model.xml") as staged:
            with naming(staged, str(output.path or staged.parent)):
                size = frontend.save(built.model, staged)
            with naming(staged, f"{self.name}, converted"):
                verified = verify(self, built, staged, on)
        return size, verified
