"""Writes ``contrib.json``: what ONNX Runtime says of its own ops, for those without it.

python -m tests.frontends.contrib_schemas > src/finecast/frontends/onnx/contrib.json
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

state: Any = import_module("onnxruntime.capi.onnxruntime_pybind11_state")

# In ONNX's own domain, but defined by ONNX Runtime alone.
_ALSO = frozenset({"SimplifiedLayerNormalization"})


def schemas() -> dict[str, Any]:
    """By ``domain::Op``: types of ports, the least and variadic ends, and type variables."""
    found: dict[str, Any] = {}
    for schema in state.get_all_operator_schema():
        if schema.domain != "com.microsoft" and schema.name not in _ALSO:
            continue
        found[f"{schema.domain}::{schema.name}"] = {
            "inputs": [p.typeStr for p in schema.inputs],
            "outputs": [p.typeStr for p in schema.outputs],
            "least": [schema.min_input, schema.min_output],
            "variadic": [_variadic(schema.inputs), _variadic(schema.outputs)],
            "constraints": {
                c.type_param_str: sorted(c.allowed_type_strs) for c in schema.type_constraints
            },
        }
    return dict(sorted(found.items()))


def _variadic(ports: list[Any]) -> bool:
    return bool(ports) and str(ports[-1].option).endswith("Variadic")


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in schemas().items()]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")
