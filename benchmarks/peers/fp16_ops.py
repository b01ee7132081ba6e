"""The ops that other tools leave in fp16, in an environment of their own.

    PYTHON benchmarks/peers/fp16_ops.py FOLDER '{"SEED": SNR_DB, ...}'

FOLDER has ``SEED.onnx`` and ``SEED.npz`` for each net. Each tool is called as documented:
onnxconverter-common's automatic conversion with a function that accepts the SNR, and
ModelOpt's AutoCast with the data for its ranges. Prints one line of JSON: by tool and seed the
names of the ops whose result is fp16, or null where the tool fails. Needs onnx, onnxruntime,
onnxconverter-common and nvidia-modelopt, not finecast.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnx

_FP16 = onnx.TensorProto.FLOAT16


def by_converter(model: Path, feeds: dict[str, Any], required_db: float) -> onnx.ModelProto:
    """onnxconverter-common: ops return to fp32 until the function accepts the outputs."""
    # Neither library is a requirement of finecast's: this file runs in another environment.
    from onnxconverter_common import auto_mixed_precision  # pyright: ignore

    def accepts(exact: Any, low: Any) -> bool:
        return bool(snr_db(exact[0], low[0]) >= required_db)

    return auto_mixed_precision.auto_convert_mixed_precision(
        onnx.load(model), feeds, validate_fn=accepts, keep_io_types=True
    )


def by_autocast(model: Path, feeds: dict[str, Any], required_db: float) -> onnx.ModelProto:
    """ModelOpt: rules by the ranges of weights and values decide; no accuracy is given."""
    from modelopt.onnx.autocast import convert_to_mixed_precision  # pyright: ignore

    del required_db
    with tempfile.NamedTemporaryFile(suffix=".npz") as data:
        np.savez(data, **feeds)
        data.flush()
        return convert_to_mixed_precision(
            str(model), low_precision_type="fp16", calibration_data=data.name,
            keep_io_types=True,
        )  # fmt: skip


def snr_db(exact: Any, low: Any) -> float:
    """Power of ``exact`` over that of the error."""
    exact, low = exact.astype(np.float64), low.astype(np.float64)
    error = float(np.square(low - exact).sum())
    if not np.isfinite(error):
        return -np.inf
    return np.inf if not error else 10 * np.log10(float(np.square(exact).sum()) / error)


def fp16_ops(model: onnx.ModelProto) -> list[str]:
    """The nodes of a model, casts left out, that compute in fp16.

    A node does if its first result is fp16, as types are inferred from where casts are.
    """
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {
        v.name: v.type.tensor_type.elem_type for v in (*inferred.value_info, *inferred.output)
    }
    return [
        node.name
        for node in inferred.node
        if node.op_type != "Cast" and types.get(node.output[0]) == _FP16
    ]


TOOLS: dict[str, Callable[[Path, dict[str, Any], float], onnx.ModelProto]] = {
    "onnxconverter-common auto": by_converter,
    "ModelOpt AutoCast": by_autocast,
}


def main() -> None:
    """All tools on all nets; what they print goes to stderr."""
    folder, wanted = Path(sys.argv[1]), json.loads(sys.argv[2])
    logging.disable(logging.WARNING)
    found: dict[str, dict[str, list[str] | None]] = {name: {} for name in TOOLS}
    for seed, required_db in wanted.items():
        feeds = dict(np.load(folder / f"{seed}.npz"))
        for name, tool in TOOLS.items():
            try:
                with redirect_stdout(sys.stderr):
                    model = tool(folder / f"{seed}.onnx", feeds, required_db)
                found[name][seed] = fp16_ops(model)
            except Exception as error:  # a failure is a row, not the end
                print(f"{name}, net {seed}: {error!r}", file=sys.stderr)
                found[name][seed] = None
    print(json.dumps(found))


if __name__ == "__main__":
    main()
