"""TensorFlow, loaded without its notices; no other module imports it.

Its names are ``Any``, as it is not installed where types are checked.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import Any, Final, TypeAlias

from finecast import Format
from finecast.errors import not_imported
from finecast.frontends import warm_up

_LEVEL: Final = "TF_CPP_MIN_LOG_LEVEL"
_NOTICE: Final = re.compile(rb"I\d{4} |WARNING: All log messages before absl::InitializeLog")


@contextmanager
def _quiet() -> Generator[None]:
    """Show TensorFlow's errors only, unless the user set a log level.

    As it loads it writes notices of itself whatever the level is. So what is written to stderr
    in that time is collected, and written without them, unless the level asks for all.
    """
    if os.environ.setdefault(_LEVEL, "2") == "0":
        yield
        return
    try:
        terminal = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    with TemporaryFile() as written:
        try:
            os.dup2(written.fileno(), 2)
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            written.seek(0)
            os.write(2, b"".join(line for line in written if not _NOTICE.match(line)))


INSTALL: Final = "pip install tensorflow"

warm_up("tensorflow")  # both processes load it at the same time
try:
    with _quiet():
        tf: Any = importlib.import_module("tensorflow")
    # These have no public names: what makes constants of variables, the registries of kernels
    # and ops, the optimizer that a session runs on a graph first, and the message that a
    # SavedModel is saved as.
    freezing: Any = importlib.import_module("tensorflow.python.framework.convert_to_constants")
    kernels: Any = importlib.import_module("tensorflow.python.framework.kernels")
    grappler: Any = importlib.import_module("tensorflow.python.grappler.tf_optimizer")
    definitions: Any = importlib.import_module("tensorflow.python.framework.op_def_registry")
    saved_model_pb2: Any = importlib.import_module("tensorflow.core.protobuf.saved_model_pb2")
except ImportError as error:
    raise not_imported("TensorFlow", error, install=INSTALL) from error

# Freezing must leave the bodies of control flow as functions. It does so for the ops in this
# set; a Case that is not in it becomes Switch and Merge.
freezing._CONTROL_FLOW_OPS.update({"Case", "StatelessCase"})


@contextmanager
def without_warnings() -> Generator[None]:
    """Hide TensorFlow's warnings inside; errors are shown."""
    logger = tf.get_logger()
    before = logger.level
    logger.setLevel(max(before, logging.ERROR))
    try:
        yield
    finally:
        logger.setLevel(before)


GraphDef: TypeAlias = Any
NodeDef: TypeAlias = Any
Tensor: TypeAlias = Any
Operation: TypeAlias = Any

DTYPES: Final = {
    Format.FP32: tf.float32,
    Format.BF16: tf.bfloat16,
    Format.FP16: tf.float16,
}
"""TensorFlow's type of each format that its ops compute in."""
FLOATS: Final = {dtype.as_datatype_enum: fmt for fmt, dtype in DTYPES.items()}
"""The format of each of those types, by its number in a GraphDef."""
_LABELS: Final = {dtype: fmt.label for fmt, dtype in DTYPES.items()} | {tf.float64: "fp64"}


def dtype_label(dtype: Any) -> str:
    """A type as the neutral graph names it: ``fp32``, ``int64``."""
    name: str = dtype.base_dtype.name
    return _LABELS.get(dtype.base_dtype, name)


def type_number(fmt: Format) -> int:
    """The number of a format's type in a GraphDef."""
    number: int = DTYPES[fmt].as_datatype_enum
    return number
