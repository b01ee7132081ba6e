"""The probes as TensorFlow graphs: the same products as in the probes' ONNX models."""

from __future__ import annotations

import numpy as np

from finecast.engines.probe_models import Probe
from finecast.errors import EngineError
from finecast.frontends.tensorflow.library import DTYPES, tf
from finecast.frontends.tensorflow.model import FrozenModel, SignaturePort
from finecast.numbers.formats import Format


def probe_graph(probe: Probe, fmt: Format) -> FrozenModel:
    """The probe: fp32 in and out, everything between in ``fmt``.

    Convolutions keep the channels last, as TensorFlow's kernels for CPUs take them.

    Raises:
        EngineError: If TensorFlow's ops do not compute in the format.
    """
    if fmt not in DTYPES:
        raise EngineError(f"TensorFlow has no {probe.op} in {fmt.label}")
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, probe.x_shape, name="x")
        convolves = probe.op == "Conv"
        value = tf.transpose(x, [0, 2, 3, 1]) if convolves else x
        value = tf.cast(value, DTYPES[fmt])
        weights = np.transpose(probe.w, (2, 3, 1, 0)) if convolves else probe.w
        w = tf.constant(weights.astype(fmt.dtype), DTYPES[fmt])
        for _ in range(probe.depth):
            made = tf.nn.conv2d(value, w, 1, "SAME") if convolves else tf.matmul(value, w)
            value = tf.nn.relu(made)
        value = tf.cast(value, tf.float32)
        y = tf.transpose(value, [0, 3, 1, 2]) if convolves else value
        tf.identity(y, name="y")
    return FrozenModel(
        graph=graph.as_graph_def(),
        inputs=(_port("x", probe.x_shape),),
        outputs=(_port("y", probe.expected.shape),),
    )


def _port(name: str, shape: tuple[int, ...]) -> SignaturePort:
    return SignaturePort(name=name, tensor=f"{name}:0", dtype="fp32", shape=shape)


def cast_graph(low: Format, size: int) -> FrozenModel:
    """Graph of a cast to ``low`` between two softmax ops, which do not absorb it.

    ``x`` is fp32 of shape [size / 64, 64]; the cast is called ``cast``.
    """
    shape = (size // 64, 64)
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, shape, name="x")
        low_value = tf.cast(tf.nn.softmax(x), DTYPES[low], name="cast")
        tf.cast(tf.nn.softmax(low_value), tf.float32, name="y")
    return FrozenModel(
        graph=graph.as_graph_def(), inputs=(_port("x", shape),), outputs=(_port("y", shape),)
    )
