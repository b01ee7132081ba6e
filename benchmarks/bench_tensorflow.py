"""Compares finecast's plans of TensorFlow models with what others do: Keras, OpenVINO.

    .venv-tf/bin/python -m benchmarks.bench_tensorflow [ROUNDS]

Keras's ResNet-50 and a transformer encoder (4 layers, width 512, exact GELU; random weights),
on 8 samples, all in one process and in turns. Those in OpenVINO are timed apart from the
others, as its threads go on spinning after a call and slow whatever runs next. Keras is
measured with its policy ``mixed_bfloat16``, and with a plan applied to its layers by
``finecast_tensorflow.keras.apply_plan``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import report, skip
from finecast import api
from finecast.engines import get_engine
from finecast.engines.base import Feeds, Session
from finecast.numbers.formats import Format

BATCH = 8
BENCH = "tensorflow"
GRAPPLER, HINT, OURS_THERE = "Grappler", "OpenVINO's hint", "all:bf16 in OpenVINO"
IN_OPENVINO = (HINT, OURS_THERE)


def resnet(keras: Any) -> Any:
    """Keras's own ResNet-50."""
    return keras.applications.ResNet50(weights=None)


def encoder(keras: Any, layers: int = 4, width: int = 512, tokens: int = 128) -> Any:
    """Attention and two dense layers with an exact GELU, ``layers`` times."""

    def gelu(x: Any) -> Any:
        return keras.activations.gelu(x, approximate=False)

    given = x = keras.Input((tokens, width), name="tokens")
    for _ in range(layers):
        seen = keras.layers.MultiHeadAttention(8, width // 8)(x, x)
        x = keras.layers.LayerNormalization()(x + seen)
        hidden = keras.layers.Dense(4 * width, activation=gelu)(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(width)(hidden))
    return keras.Model(given, x)


def made(make: Callable[[Any], Any], policy: str = "float32") -> Any:
    """The network under one of Keras's policies; its weights are the same under all."""
    keras: Any = importlib.import_module("keras")
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(0)
        return make(keras)
    finally:
        keras.config.set_dtype_policy(before)


def sessions(make: Callable[[Any], Any], folder: Path) -> dict[str, Session]:
    """The model as it is, and each way to lower it."""
    from finecast_tensorflow.keras import apply_plan
    from finecast_tensorflow.native import take

    model = made(make)
    model.export(str(folder / "m"), verbose=False)
    opened = api.load(folder / "m")
    data = named(opened.reference())
    tensorflow, openvino = get_engine("tensorflow"), get_engine("openvino")
    found: dict[str, Session] = {
        "fp32": tensorflow.load(opened.model),
        GRAPPLER: tensorflow.load_hinted(opened.model, Format.BF16),
        "Keras's mixed_bfloat16": tensorflow.load(take(made(make, "mixed_bfloat16")).model),
    }
    for policy in ("all:bf16", "auto:bf16"):
        done = api.convert(opened, None, policy, data=data, verify=False)
        found[policy] = tensorflow.load(done.model)
    layers = made(make)
    apply_plan(layers, api.convert(take(layers), None, "all:bf16", verify=False).plan)
    found["apply_plan of all:bf16"] = tensorflow.load(take(layers).model)
    ir = folder / "fp32.xml"
    api.convert(folder / "m", ir, "none:bf16", verify=False)
    found[HINT] = openvino.load_hinted(ir, Format.BF16)
    low = api.convert(ir, None, "all:bf16", data=named(openvino.load(ir)), verify=False)
    found[OURS_THERE] = openvino.load(low.model)
    return found


def named(session: Session) -> dict[str, NDArray[np.float32]]:
    """Random numbers for the one input, the same for all sessions of a network."""
    (port,) = session.inputs
    shape = (BATCH, *(d for d in (port.shape or ())[1:] if isinstance(d, int)))
    return {port.name: np.random.default_rng(0).normal(size=shape).astype(np.float32)}


def compare(name: str, make: Callable[[Any], Any], rounds: int) -> None:
    """Print one network's figures."""
    with TemporaryDirectory() as at:
        timed = sessions(make, Path(at))
        outputs = {n: output(s, named(s)) for n, s in timed.items()}
        apart = {n: s for n, s in timed.items() if n not in IN_OPENVINO}
        times = in_turns(apart, rounds)
        beside = in_turns({n: timed[n] for n in (GRAPPLER, *IN_OPENVINO)}, rounds)

    def error(one: str) -> float:
        exact = outputs["fp32"]
        return float(np.linalg.norm(outputs[one] - exact) / np.linalg.norm(exact))

    def speed(one: str, other: str) -> float:
        race = beside if one in IN_OPENVINO else times
        return round(float(np.median(race[other]) / np.median(race[one])), 3)

    for one in timed:
        race = beside if one in IN_OPENVINO else times
        report(
            BENCH, f"{name}: {one}", round(float(np.median(race[one])) * 1e3, 1), "ms",
            of_grapplers_speed=speed(one, GRAPPLER), relative_error=error(one),
        )  # fmt: skip
    report(BENCH, f"{name}: speed against Grappler", speed("all:bf16", GRAPPLER), "x",
           bar=0.97, at_least=True)  # fmt: skip
    report(BENCH, f"{name}: error against Grappler",
           round(error("all:bf16") / error(GRAPPLER), 3), "x", bar=1.0)  # fmt: skip
    report(BENCH, f"{name}: speed in OpenVINO against its hint", speed(OURS_THERE, HINT),
           "x", bar=0.97, at_least=True)  # fmt: skip
    report(BENCH, f"{name}: speed in OpenVINO against Grappler", speed(OURS_THERE, GRAPPLER),
           "x", bar=1.8, at_least=True)  # fmt: skip


def in_turns(timed: Mapping[str, Session], rounds: int) -> dict[str, list[float]]:
    """Seconds of each session, in another order each round: a session slows the next one."""
    feeds = {n: named(s) for n, s in timed.items()}
    times: dict[str, list[float]] = {n: [] for n in timed}
    order = np.random.default_rng(0)
    for turn in range(rounds + 1):
        for one in order.permutation(list(timed)):
            start = time.perf_counter()
            output(timed[one], feeds[one])
            if turn:  # the first one warms up
                times[one].append(time.perf_counter() - start)
    return times


def output(session: Session, feeds: Feeds) -> NDArray[np.float32]:
    """The one output, in fp32."""
    (found,) = session.run(feeds).values()
    return found.astype(np.float32)


def main(rounds: int) -> None:
    """Compare on both networks, if TensorFlow is installed."""
    if importlib.util.find_spec("tensorflow") is None:
        skip(BENCH, "TensorFlow is not installed: .venv-tf/bin/python runs it")
        return
    for name, network in (("encoder", encoder), ("resnet50", resnet)):
        compare(name, network, rounds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
