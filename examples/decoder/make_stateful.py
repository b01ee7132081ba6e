"""Write ``decoder.onnx`` as IR that keeps its cache, as optimum-intel exports decoders.

Keys and values of earlier calls are a state of the model, and no longer inputs and outputs.
An input ``beam_idx`` says which text each row goes on with, and attention is one op, in whose
kernel OpenVINO keeps the cache.

    python examples/decoder/make_decoder.py --out decoder
    python examples/decoder/make_stateful.py decoder/decoder.onnx decoder/decoder.xml
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset13
from openvino._offline_transformations import apply_make_stateful_transformation

ops: Any = opset13  # its functions are made at run time


def attend_in_one_op(model: openvino.Model) -> None:
    """Have each block's products and its softmax done by one op."""
    made = {op.get_friendly_name(): op for op in model.get_ordered_ops()}
    for i in range(sum(name.endswith("_mixed:MatMul") for name in made)):
        query = made[f"layer{i}_products:MatMul"].input_value(0)
        keys, values = (
            model.output(f"present_{i}_{kind}").get_node().input_value(0)
            for kind in ("key", "value")
        )
        mask = made[f"layer{i}_scores:Add"].input_value(1)
        mixed = made[f"layer{i}_mixed:MatMul"]
        attention = ops.scaled_dot_product_attention(
            query, keys, values, mask, causal=False, name=f"layer{i}_attention"
        )
        for reader in mixed.output(0).get_target_inputs():
            reader.replace_source_output(attention.output(0))


def keep_cache(model: openvino.Model) -> None:
    """Make inputs called past and outputs called present a state, of no position at first."""
    state = {p.any_name: p for p in model.inputs if p.any_name.startswith("past")}
    heads, size = (
        next(iter(state.values())).partial_shape[axis].get_length() for axis in (1, 3)
    )
    beams = ops.parameter([-1], np.int32, name="beam_idx")
    beams.output(0).set_names({"beam_idx"})
    model.add_parameters([beams])
    zero = ops.constant(0)
    for port in state.values():
        readers = port.get_target_inputs()
        ordered = ops.gather(port.get_node(), beams, zero)
        for reader in readers:
            reader.replace_source_output(ordered.output(0))
    # transformers calls them past_key_values.0.key and present.0.key.
    pairs = {name: re.sub("^past(_key_values)?", "present", name) for name in state}
    apply_make_stateful_transformation(model, pairs)
    texts = ops.gather(ops.shape_of(model.input("input_ids").get_node()), [0], zero)
    sizes = ops.concat([texts, ops.constant([heads, 0, size], dtype=np.int64)], 0)
    for op in model.get_ops():
        if op.get_type_name() == "ReadValue":
            op.set_arguments([ops.broadcast(ops.constant(np.float32(0)), sizes)])
    model.validate_nodes_and_infer_types()


def main(source: Path, output: Path) -> None:
    """Read ``source``, and write both files of the IR."""
    model = openvino.Core().read_model(source)
    attend_in_one_op(model)
    keep_cache(model)
    openvino.save_model(model, output, compress_to_fp16=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the decoder with its cache as inputs")
    parser.add_argument("output", type=Path, help="the IR to write, NAME.xml")
    given = parser.parse_args()
    main(given.source, given.output)
