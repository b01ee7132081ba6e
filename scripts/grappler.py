"""finecast's plans beside Grappler's automatic mixed precision, in one process, in turns.

    .venv-tf/bin/python scripts/grappler.py [ROUNDS]

Keras's ResNet-50 and a transformer encoder (4 layers, width 512, exact GELU; random weights),
on 8 samples. Prints JSON: times, speeds against Grappler's within each round, and errors.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from finecast.engines.base import Session
from finecast.engines.tensorflow import TensorFlowEngine
from finecast.measure.environment import environment
from finecast.numbers.formats import Format
from finecast.pipeline.artefact import Destination
from finecast.pipeline.model import RunOptions
from finecast.rules.policy import Policy
from finecast.subjects.tensorflow.model import TensorFlowModel, take

BATCH = 8


def resnet(keras: Any) -> Any:
    """Keras's own ResNet-50."""
    return keras.applications.ResNet50(weights=None)


def encoder(keras: Any, layers: int = 4, width: int = 512, tokens: int = 128) -> Any:
    """Attention and two dense layers with an exact GELU, ``layers`` times."""

    def gelu(x: Any) -> Any:
        return keras.activations.gelu(x, approximate=False)

    given = x = keras.Input((tokens, width))
    for _ in range(layers):
        seen = keras.layers.MultiHeadAttention(8, width // 8)(x, x)
        x = keras.layers.LayerNormalization()(x + seen)
        hidden = keras.layers.Dense(4 * width, activation=gelu)(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(width)(hidden))
    return keras.Model(given, x)


def sessions(opened: TensorFlowModel) -> dict[str, Session]:
    """The model as it is, as Grappler lowers it, and by finecast's policies."""
    engine = TensorFlowEngine()
    found: dict[str, Session] = {
        "fp32": engine.load(opened.model),
        "grappler": engine.load_hinted(opened.model, Format.BF16),
    }
    for policy in ("all:bf16", "auto:bf16"):
        options = RunOptions(batch=BATCH, verify=False)
        done = opened.convert(Destination(path=None), Policy.of(policy), options)
        found[policy] = engine.load(done.model)
    return found


def compare(name: str, make: Callable[[Any], Any], rounds: int) -> dict[str, Any]:
    """One network's row."""
    keras = importlib.import_module("keras")
    keras.utils.set_random_seed(0)
    opened = take(make(keras))
    (port,) = opened.model.inputs
    shape = (BATCH, *(port.shape or ())[1:])
    feeds = {port.name: np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    timed = sessions(opened)
    outputs = {n: next(iter(s.run(feeds).values())) for n, s in timed.items()}
    times: dict[str, list[float]] = {n: [] for n in timed}
    for turn in range(rounds):
        for one in sorted(timed, reverse=bool(turn % 2)):
            start = time.perf_counter()
            timed[one].run(feeds)
            times[one].append(time.perf_counter() - start)
    norm = np.linalg.norm(outputs["fp32"])
    return {
        "network": name,
        **{
            one: {
                "ms": round(float(np.median(times[one])) * 1e3, 1),
                "of_grapplers_speed": round(
                    float(np.median(np.divide(times["grappler"], times[one]))), 3
                ),
                "relative_error": float(np.linalg.norm(outputs[one] - outputs["fp32"]) / norm),
            }
            for one in timed
        },
    }


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    print(json.dumps(environment().as_json()))
    for label, network in (("encoder", encoder), ("resnet50", resnet)):
        print(json.dumps(compare(label, network, count)), flush=True)
