"""What SavedModels have, and texts of errors about that, for all libraries that read one."""

from __future__ import annotations

import re
from typing import Final

WRITES: Final = re.compile(r"(Assign\w*Variable|ResourceScatter\w*|ResourceApply\w*)(Op)?")
"""Names of ops that change a variable."""
SERVING: Final = "serving_default"
"""The signature that servers, and TensorFlow's own tools, call where none is named."""
NONE: Final = "the SavedModel has no signatures"
MAKE_ONE: Final = (
    "save it with one: tf.saved_model.save(model, FOLDER,"
    " signatures=function.get_concrete_function(...)), or model.export(FOLDER)"
)
CHOOSE: Final = (
    "save one alone: m = tf.saved_model.load(FOLDER); tf.saved_model.save(m, NEW,"
    ' signatures=m.signatures["NAME"])'
)
