"""Models with bodies and calls, as users of TensorFlow and Keras write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from plugins.tensorflow.tests.models import of_function, tf

keras: Any = pytest.importorskip("keras")

WIDTH: Final = 16
ROWS = tf.TensorSpec([None, WIDTH], tf.float32, name="x")


def weights(count: int) -> list[Any]:
    rng = np.random.default_rng(count)
    shape = (WIDTH, WIDTH)
    return [tf.Variable((rng.normal(size=shape) / 3).astype(np.float32)) for _ in range(count)]


def while_loop(path: Path) -> None:
    """A product in each step, to which what the loop never changes is added."""
    first, inner, last = kept = weights(3)

    def call(x: Any) -> dict[str, Any]:
        def step(i: Any, y: Any) -> tuple[Any, Any]:
            return i + 1, tf.nn.relu(tf.matmul(y, inner)) + x

        y = tf.while_loop(lambda i, _: i < 3, step, (0, tf.matmul(x, first)))[1]
        return {"y": tf.matmul(y, last)}

    of_function(path, call, [ROWS], kept)


def cond(path: Path) -> None:
    """A product in either branch, by the sign of the inputs' sum."""
    one, other, last = kept = weights(3)

    def call(x: Any) -> dict[str, Any]:
        y = tf.cond(
            tf.reduce_sum(x) > 0,
            lambda: tf.nn.relu(tf.matmul(x, one)),
            lambda: tf.tanh(tf.matmul(x, other)),
        )
        return {"y": tf.matmul(y, last)}

    of_function(path, call, [ROWS], kept)


def case(path: Path) -> None:
    """One of three products, by an input."""
    kept = weights(3)

    def call(x: Any, branch: Any) -> dict[str, Any]:
        products = [lambda w=w: tf.matmul(x, w) for w in kept]
        return {"y": tf.nn.relu(tf.switch_case(branch, products))}

    of_function(path, call, [ROWS, tf.TensorSpec([], tf.int32, name="branch")], kept)


def nested(path: Path) -> None:
    """A branch is taken in each step of a loop."""
    one, other = kept = weights(2)

    def step(i: Any, y: Any) -> tuple[Any, Any]:
        z = tf.cond(
            tf.equal(i, 1),
            lambda: tf.nn.relu(tf.matmul(y, one)),
            lambda: tf.tanh(tf.matmul(y, other)),
        )
        return i + 1, z + y

    def call(x: Any) -> dict[str, Any]:
        return {"y": tf.tanh(tf.while_loop(lambda i, _: i < 3, step, (0, x))[1])}

    of_function(path, call, [ROWS], kept)


def calls(path: Path, **options: Any) -> None:
    """A function that calls a function, in a loop and outside of it."""
    one, other = kept = weights(2)
    inner = tf.function(lambda x: tf.nn.relu(tf.matmul(x, one)), **options)
    outer = tf.function(lambda x: inner(x) + tf.matmul(x, other))

    def call(x: Any) -> dict[str, Any]:
        def step(i: Any, y: Any) -> tuple[Any, Any]:
            return i + 1, tf.tanh(outer(inner(y)))

        return {"y": inner(tf.while_loop(lambda i, _: i < 2, step, (0, outer(x)))[1])}

    of_function(path, call, [ROWS], kept)


def compiled_calls(path: Path) -> None:
    """The same, but that XLA is to compile what is called."""
    calls(path, jit_compile=True)


def mapped(path: Path) -> None:
    """Row by row, through lists."""
    (w,) = kept = weights(1)

    def call(x: Any) -> dict[str, Any]:
        return {"y": tf.map_fn(lambda row: tf.nn.relu(tf.linalg.matvec(w, row)), x)}

    of_function(path, call, [ROWS], kept)


def recurrent(path: Path, kind: str, **options: Any) -> None:
    """A layer of Keras's under a dense one."""
    keras.utils.set_random_seed(0)
    given = keras.Input((4, WIDTH), name="x")
    layer = getattr(keras.layers, kind)(WIDTH, return_sequences=True, **options)
    model = keras.Model(given, keras.layers.Dense(8)(layer(given)))
    model.export(str(path), verbose=False)


def lstm(path: Path) -> None:
    """A While whose states and sequences are lists."""
    recurrent(path, "LSTM")


def gru(path: Path) -> None:
    """Another."""
    recurrent(path, "GRU")


def unrolled(path: Path) -> None:
    """The steps one after the other, without a While."""
    recurrent(path, "LSTM", unroll=True)


MODELS: Final[dict[str, Callable[[Path], None]]] = {
    f.__name__: f
    for f in (
        *(while_loop, cond, case, nested, calls, compiled_calls),
        *(mapped, lstm, gru, unrolled),
    )
}


def feeds_of(inputs: Sequence[Any], seed: int = 0) -> dict[str, Any]:
    """Random numbers for a session's inputs."""
    rng = np.random.default_rng(seed)
    return {
        port.name: np.array(seed % 3, np.int32)
        if port.dtype == "int32"
        else rng.normal(size=[d if isinstance(d, int) else 3 for d in port.shape]).astype("f")
        for port in inputs
    }
