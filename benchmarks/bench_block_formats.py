"""Formats of blocks on an emulated sm100: mixed plans beside uniform ones.

    python examples/decoder/make_decoder.py --out FOLDER
    python -m benchmarks.bench_block_formats FOLDER

For the trained decoder of FOLDER and one of twelve layers with random weights: the frontier of
modelled time and of the divergence (kld) of the next token's chances, for plans in nvfp4, in
mxfp8 and mixed. Divergences are of texts that nothing was chosen by.

The decoders are narrow, so that a CPU can emulate them; launches and traffic would take all of
their time. Times are therefore those of decoders ``WIDER`` times as wide on ``LONGER`` times
as many tokens: per operation of a product values move a ``WIDER``-th of the bytes, and
launches nearly vanish (weights count a little too little by this, and attention a little too
much).

What is to be read from it: mixed plans are on or below each uniform plan, which gives each
product with weights one format, and bf16 to the rest. Where none is below it is printed how
much more the best one diverges that takes no more time, with twice the standard error of that
over the texts. At the bits a weight of a recipe whose
products from both ends are mxfp8, and whose others are nvfp4, the mixed plan diverges at most
half as much.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from benchmarks.common import report
from finecast.api.models import opened_in_fp32
from finecast.data.options import DataOptions
from finecast.data.sources import workload_of
from finecast.devices.emulation import Emulation
from finecast.devices.targets import load_target
from finecast.engines.base import Array, Session
from finecast.graph import Node
from finecast.native.device import plan_time_s
from finecast.native.model import ReadOptions
from finecast.numbers.formats import Format
from finecast.planning.cost import RooflineCost
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.pricing import limited
from finecast.planning.problem import Analysis, Proposal
from finecast.planning.proposing import between, near, propose, stated, weight_bytes
from finecast.progress import silent
from finecast.rules.policy import Policy

_ROOT: Final = Path(__file__).resolve().parents[1]
WIDER, LONGER = 64, 64
_SCALE: Final = WIDER**2 * LONGER
BITS: Final = 5.0
_LAYERS: Final = 12
_RANDOM: Final = {"width": 128, "layers": _LAYERS, "heads": 4, "hidden": 384}
# Texts by which plans are chosen, those that are judged, and the tokens of each.
# By two texts, errors of single ops were up to a third off, and the order of formats changed.
_CHOSEN, _JUDGED, _LENGTH = 8, 16, 32
_STEPS: Final = 10
_LOW, _HIGH, _REST = Format.NVFP4, Format.MXFP8_E4M3, Format.BF16
_MIXED: Final = (
    _LOW, Format.NVFP4_FOUR_OVER_SIX, _HIGH, Format.NVFP4_WEIGHTS_BF16, _REST,
)  # fmt: skip
# kld in fp64 of equal plans differs by the order of sums in fp32.
_SAME: Final = 1.0 + 1e-3

Feeds = Mapping[str, Array]


def main() -> None:
    """Measure both decoders."""
    parser = argparse.ArgumentParser(description="Mixed plans of block formats on sm100.")
    parser.add_argument("folder", type=Path, help="what make_decoder.py wrote")
    parser.add_argument("--only", choices=("trained", "random"))
    asked = parser.parse_args()
    texts = np.load(asked.folder / "texts.npz")["input_ids"][:, :_LENGTH]
    with tempfile.TemporaryDirectory() as temporary:
        paths = {"trained": asked.folder / "decoder.onnx", "random": Path(temporary, "r.onnx")}
        onnx.save(random_decoder(), paths["random"])
        for name in [asked.only] if asked.only else paths:
            _measured(name, Decoder(path=paths[name], texts=texts))


def random_decoder() -> onnx.ModelProto:
    """The example's decoder with more layers, and weights as they are drawn to be trained."""
    path = _ROOT / "examples" / "decoder" / "make_decoder.py"
    spec = importlib.util.spec_from_file_location("make_decoder", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["make_decoder"] = example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    options = example.Options(out=Path(), **_RANDOM)
    return example.model_of(example.weights_of(example.Decoder(options)), options)


def wide_device() -> Emulation:
    """sm100, in units of the time that a decoder takes that is so much wider."""
    device = load_target("sm100")
    return Emulation(
        target=replace(
            device,
            bandwidth_gb_s=device.bandwidth_gb_s * WIDER,
            op_overhead_s=device.op_overhead_s / _SCALE,
            cast_overhead_s=device.cast_overhead_s / _SCALE,
        )
    )


@dataclass(kw_only=True)
class Decoder:
    """A decoder, what a search learnt of it, and how its plans do on the device.

    Attributes:
        path: The model.
        texts: Tokens: those that plans are chosen by first, then those that are judged.
        device: Emulates it.
        planner: Makes plans of it.
        analysis: Times and errors of its units.
    """

    path: Path
    texts: NDArray[np.int64]
    device: Emulation = field(default_factory=wide_device)
    planner: Planner = field(init=False)
    analysis: Analysis = field(init=False)

    def __post_init__(self) -> None:
        """Measure the sensitivities, as a search does."""
        self._model = opened_in_fp32(self.path, ReadOptions())
        subject = self._model.subject(None, self.device)
        options = DataOptions(
            data=self.feeds(self.texts[:_CHOSEN]), metric="kld", of="logits", batch=_CHOSEN
        )
        workload = workload_of(options, self._model.reference())
        policy = Policy.parse("auto:" + ",".join(f.label for f in _MIXED))
        examined = subject.examine(policy, (), workload, silent)
        self.planner = examined.planner
        # No bound yet: a limit lets bytes be counted.
        self.analysis = limited(self.planner, examined.analysis(), np.inf, nodes=False)
        self._judged = self.feeds(self.texts[_CHOSEN : _CHOSEN + _JUDGED])
        self._exact = _chances(self._model.reference(), self._judged)
        self._program = self._model.program(self.device)
        self._cost = RooflineCost(
            target=self.device.target,
            shapes={i: f.shape for i, f in examined.observed.items()},
        )

    def feeds(self, texts: NDArray[np.int64]) -> dict[str, Array]:
        """A call on whole texts, with an empty cache."""
        found: dict[str, Array] = {"input_ids": texts}
        for one in onnx.load(self.path).graph.input:
            if one.name != "input_ids":
                _, heads, _, size = (d.dim_value for d in one.type.tensor_type.shape.dim)
                found[one.name] = np.zeros((len(texts), heads, 0, size), np.float32)
        return found

    def at(self, plan: Plan) -> At:
        """Where a plan is: its bits, modelled time, and divergence on judged texts."""
        session = self._program.plan_session(plan, self.device).restart()
        klds = _divergences(self._exact, _chances(session, self._judged))
        formats = self._program.formats(plan)
        time_s = plan_time_s(self.planner.graph, self._cost, self.device, formats)
        return At(bits=self.bits(plan), time_us=1e6 * _SCALE * time_s, klds=klds)

    def bits(self, plan: Plan) -> float:
        """Mean bits of the weights of products, with their shares of scales.

        The embedding is looked up, and is a 256th of the weights in a decoder so much wider.
        """
        formats = {d.node: d.format for d in plan.decisions}
        taken = sum(8 * formats[n.name].bytes_for(c) for n, c in self.weights)
        return taken / sum(c for _, c in self.weights)

    def bytes(self, plan: Plan) -> float:
        """Bytes of all weights, as a bound on size counts them."""
        return weight_bytes(self.planner, self.analysis, plan)

    @property
    def weights(self) -> list[tuple[Node, int]]:
        """The products that have a constant operand, in their order, and its numbers."""
        graph = self.planner.graph
        found = [
            (node, graph.values[i].constant)
            for node in graph.float_nodes
            if node.op == "matmul"
            for i in node.inputs
            if i is not None
        ]
        return [(node, constant.size) for node, constant in found if constant is not None]

    def stated(self, name: str, formats: Mapping[int, Format]) -> Proposal:
        """The plan of these formats; other ops are in bf16, where they may be."""
        rest = dict.fromkeys((n.id for n in self.planner.graph.float_nodes), _REST)
        return stated(self.planner, self.analysis, {**rest, **formats}, name)

    def uniform(self) -> Iterator[Proposal]:
        """Plans of one format: of products with weights, as tools have them."""
        linear = [n.id for n, _ in self.weights]
        for fmt in (_LOW, Format.NVFP4_FOUR_OVER_SIX, _HIGH, _REST):
            yield self.stated(f"uniform {fmt.label}", dict.fromkeys(linear, fmt))

    def recipe(self) -> Plan:
        """nvfp4, but for products from both ends in mxfp8, as many as ``BITS`` permits."""
        nodes = [n.id for n, _ in self.weights]
        formats = dict.fromkeys(nodes, _LOW)
        for k in range(len(nodes)):
            for end in (nodes[k], nodes[-1 - k]):
                more = {**formats, end: _HIGH}
                if self.bits(self.stated("recipe", more).plan) > BITS:
                    return self.stated("recipe", formats).plan
                formats = more
        return self.stated("recipe", formats).plan

    def kept_to(self, uniform: Proposal) -> list[Proposal]:
        """Mixed plans whose predicted error is that of a uniform one, or somewhat less."""
        free, most = replace(self.analysis, limit=None), uniform.error
        steps = between(self.planner, free, (most / 4, most * _SAME), most=4)
        return [*steps, *near(self.planner, free, most, (1.0, 0.8))]

    def mixed(self, most_bytes: float | None = None) -> list[Proposal]:
        """The frontier of predicted time and error, of plans of at most so many bytes."""
        analysis = replace(self.analysis, limit=None)
        if most_bytes is not None:
            analysis = limited(self.planner, analysis, most_bytes, nodes=False)
        return propose(self.planner, analysis, max_steps=_STEPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """Where a plan is: bits a weight, modelled time, and divergence of each text."""

    bits: float
    time_us: float
    klds: NDArray[np.float64]

    @property
    def kld(self) -> float:
        """The mean divergence."""
        return max(float(self.klds.mean()), 0.0)

    def beside(self, uniform: At) -> str:
        """How much more it diverges than ``uniform``, with twice the standard error."""
        if self.kld <= uniform.kld * _SAME:
            return "on or below"
        more = (self.klds - uniform.klds) / uniform.kld
        deviation = 2 * more.std(ddof=1) / np.sqrt(len(more))
        return f"{100 * more.mean():.2g}% above, give or take {100 * deviation:.2g}%"


def _measured(name: str, decoder: Decoder) -> None:
    """Print a line for each plan, and both bars."""
    recipe = decoder.recipe()
    lost = _told(name, f"ends in {_HIGH.label}, {BITS:g} bits", decoder.at(recipe)).kld
    for plan in decoder.mixed(decoder.bytes(recipe))[:2]:  # the most accurate ones
        at = decoder.at(plan.plan)
        _told(name, "mixed, of as many bytes", at, of_recipe=round(at.kld / lost, 3))
    mixed = [_told(name, p.name, decoder.at(p.plan)) for p in decoder.mixed()]
    for uniform in decoder.uniform():
        at = decoder.at(uniform.plan)
        beside = [_told(name, p.name, decoder.at(p.plan)) for p in decoder.kept_to(uniform)]
        mixed += beside
        as_fast = [one for one in mixed if one.time_us <= at.time_us * _SAME]
        best = min(as_fast, key=lambda one: one.kld, default=None)
        _told(name, uniform.name, at, mixed_is="slower" if best is None else best.beside(at))


def _told(name: str, what: str, at: At, **more: Any) -> At:
    report(
        name, what, float(f"{at.kld:.4g}"), "nats", bits=round(at.bits, 3),
        time_us=round(at.time_us, 1), **more,
    )  # fmt: skip
    return at


def _chances(session: Session, feeds: Feeds) -> NDArray[np.float64]:
    """The logarithm of the chances of each next token, [text, token, vocabulary]."""
    logits = session.run(feeds)["logits"].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def _divergences(exact: NDArray[np.float64], low: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each text the mean over its tokens."""
    return (np.exp(exact) * (exact - low)).sum(axis=-1).mean(axis=-1)


if __name__ == "__main__":
    sys.exit(main())
