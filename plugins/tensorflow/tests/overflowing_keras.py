"""Keras models whose values leave fp16's range, as those of T5 and Gemma do.

They are smaller than the nets of ``overflowing_nets``, which they follow: a residual stream to
which products with large weights are added, or that norms with large gains write to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast_tensorflow.frontend.library import tf

keras: Final[Any] = tf.keras
WIDTH: Final = 32
HEADS: Final = 2
HIDDEN: Final = 64
LAYERS: Final = 2
WORDS: Final = 101
LENGTH: Final = 12


class RootMeanSquareNorm(keras.layers.Layer):  # type: ignore[misc]
    """``x / rms(x)`` times its weight, plus ``one``: T5's norm, or with 1 that of Gemma."""

    def __init__(self, one: float = 0.0, gain: float = 0.0) -> None:
        super().__init__()
        self.one, self.gain = one, gain

    def build(self, shape: Any) -> None:
        """The weight, with ``gain`` at most added to what gives 1."""
        draw = np.random.default_rng(7).uniform(0, 1, shape[-1]) * self.gain
        start = keras.initializers.Constant(1.0 - self.one + draw)
        self.weight = self.add_weight(shape=(shape[-1],), initializer=start)

    def call(self, x: Any) -> Any:
        """The norm, written out."""
        square = tf.reduce_mean(tf.square(x), axis=-1, keepdims=True)
        return x * tf.math.rsqrt(square + 1e-6) * (self.weight + self.one)


def dense(units: int, scale: float = 1.0) -> Any:
    """A product without a bias, whose weights are ``scale`` times what is usual."""
    start = keras.initializers.VarianceScaling(scale**2, seed=units)
    return keras.layers.Dense(units, use_bias=False, kernel_initializer=start)


def attention(x: Any, out: float) -> Any:
    """Keras's own attention, whose products are einsums."""
    start = keras.initializers.GlorotUniform(seed=3)
    made = keras.layers.MultiHeadAttention(
        HEADS, WIDTH // HEADS, kernel_initializer=start, use_bias=False
    )
    return keras.layers.Rescaling(out)(made(x, x))


def mlp(x: Any, wide: float, out: float) -> Any:
    """GELU-gated feed-forward products."""
    gate = keras.activations.gelu(dense(HIDDEN, wide)(x), approximate=True)
    return dense(WIDTH, out)(gate * dense(HIDDEN, wide)(x))


def t5() -> Any:
    """What the blocks add to the stream is large, and most so what ``wo`` gives."""
    ids = keras.Input((LENGTH,), dtype="int32", name="ids")
    x = keras.layers.Embedding(WORDS, WIDTH)(ids)
    for _ in range(LAYERS):
        x = x + attention(RootMeanSquareNorm()(x), 20_000.0)
        x = x + mlp(RootMeanSquareNorm()(x), 5.0, 20_000.0)
    return keras.Model(ids, dense(WORDS)(RootMeanSquareNorm()(x)))


def gemma() -> Any:
    """The products between the norms are large, and so are the gains of the second norms."""
    ids = keras.Input((LENGTH,), dtype="int32", name="ids")
    x = keras.layers.Rescaling(WIDTH**0.5)(keras.layers.Embedding(WORDS, WIDTH)(ids))
    for _ in range(LAYERS):
        added = attention(RootMeanSquareNorm(1.0)(x), 1.0)
        x = x + RootMeanSquareNorm(1.0, 20_000.0)(added)
        added = mlp(RootMeanSquareNorm(1.0)(x), 300.0, 1.0)
        x = x + RootMeanSquareNorm(1.0, 20_000.0)(added)
    logits = dense(WORDS)(RootMeanSquareNorm(1.0)(x))
    return keras.Model(ids, keras.ops.tanh(logits / 30.0) * 30.0)


MODELS: Final[Mapping[str, Callable[[], Any]]] = {"t5": t5, "gemma": gemma}


def data(samples: int = 4) -> dict[str, NDArray[np.int32]]:
    """Drawn words."""
    draw = np.random.default_rng(1)
    return {"ids": draw.integers(0, WORDS, (samples, LENGTH)).astype(np.int32)}
