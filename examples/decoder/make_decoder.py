"""Train a decoder on text that comes with Python, and export it with a key-value cache.

It writes ``decoder.onnx``, the same function with planted outlier channels as
``planted.onnx``, and ``texts.npz`` with held-out texts. Nothing is downloaded: the texts are
the language reference that Python's ``help()`` shows.

    pip install torch==2.13.0 onnx
    python examples/decoder/make_decoder.py --out decoder

The seed fixes the initial weights and the order of the texts. Weights still differ in their
last bits between machines: the order of additions in a product is not fixed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import onnx
import onnx.parser
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256  # a token is a byte
EPSILON = 1e-5
HELD_OUT = 0.1  # the share of the text, at its end, that is not trained on
OUTLIER = 64.0
"""The factor of planted channels. Large decoders have a few channels that are 60 and more
times as large as the others; a power of two keeps every product as it was, bit by bit."""
PLANTED = 3  # channels in each place


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line sets."""

    out: Path
    text: Path | None = None
    width: int = 256
    layers: int = 4
    heads: int = 4
    hidden: int = 768
    length: int = 256
    batch: int = 8
    steps: int = 300
    seed: int = 0


class Block(nn.Module):
    """Attention with rotary positions, then a gated MLP, each beside an identity."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width, hidden = options.width, options.hidden
        self.heads = options.heads
        self.norm1 = nn.RMSNorm(width, eps=EPSILON)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width, eps=EPSILON)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """[batch, length] bytes to [batch, length, 256] logits of the next byte."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.width, eps=EPSILON)
        self.head = nn.Linear(options.width, BYTES, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(
                    weight, std=0.02 / math.sqrt(2 * options.layers if last else 1)
                )

    def forward(self, tokens: Tensor) -> Tensor:
        block = self.blocks[0]
        assert isinstance(block, Block)
        size = self.embed.embedding_dim // block.heads
        angles = torch.arange(tokens.shape[1])[:, None] * torch.tensor(frequencies(size))
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


def frequencies(size: int) -> np.ndarray:
    """Rotations by position of each pair of a head's channels: shape [size / 2]."""
    return (10000.0 ** (-np.arange(0, size, 2) / size)).astype(np.float32)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: each channel of a head's first half turns with one of its second."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def corpus(path: Path | None) -> np.ndarray:
    """The text's bytes; without a path the topics of Python's ``help()``."""
    if path is not None:
        return np.frombuffer(path.read_bytes(), np.uint8)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode(), np.uint8)


def train(net: Decoder, data: Tensor, options: Options) -> None:
    """Fit in place: AdamW, one cycle of the learning rate, pieces of text drawn at random."""
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=options.steps, pct_start=0.1
    )
    draw = torch.Generator().manual_seed(options.seed)
    reach = torch.arange(options.length + 1)
    for step in range(options.steps):
        start = torch.randint(len(data) - options.length, (options.batch, 1), generator=draw)
        piece = data[start + reach]
        logits = net(piece[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 24:
            print(f"step {step + 1:4d}/{options.steps}  loss {loss.item():.4f}", flush=True)


def weights_of(net: Decoder) -> dict[str, np.ndarray]:
    """Weights by the names in the graph; those of products as [inputs, outputs]."""
    found: dict[str, np.ndarray] = {}
    for name, weight in net.state_dict().items():
        array = weight.numpy()
        name = name.removesuffix(".weight").replace("blocks.", "layer").replace(".", "_")
        found[name] = array.T.copy() if array.ndim == 2 and name != "embed" else array.copy()
    return found


def planted(weights: dict[str, np.ndarray], layers: int, seed: int) -> dict[str, np.ndarray]:
    """The same function, with outlier channels in what every product but attention reads.

    A channel that is multiplied where it is made, by the norm's scale or by ``up``, is divided
    in the rows of the products that read it.
    """
    found = {name: array.copy() for name, array in weights.items()}
    rng = np.random.default_rng(seed)

    def plant(made: str, axis: int, *readers: str) -> None:
        at = rng.choice(found[made].shape[axis], PLANTED, replace=False)
        found[made][(slice(None),) * axis + (at,)] *= OUTLIER
        for reader in readers:
            found[reader][at] /= OUTLIER

    for i in range(layers):
        plant(f"layer{i}_norm1", 0, f"layer{i}_qkv")
        plant(f"layer{i}_norm2", 0, f"layer{i}_gate", f"layer{i}_up")
        plant(f"layer{i}_up", 1, f"layer{i}_down")
    plant("norm", 0, "head")
    return found


def norm_lines(made: str, read: str) -> str:
    """The nodes of a norm by the root of the mean square; its scale is called ``made``."""
    return f"""
        {made}_square = Mul({read}, {read})
        {made}_mean = ReduceMean<keepdims=1>({made}_square, last_axis)
        {made}_above = Add({made}_mean, epsilon)
        {made}_root = Sqrt({made}_above)
        {made}_unit = Div({read}, {made}_root)
        {made}_out = Mul({made}_unit, {made})"""


def rotation_lines(x: str) -> str:
    """The nodes that turn ``x`` by its positions, to ``x_rotated``."""
    return f"""
        {x}_1, {x}_2 = Split<axis=-1, num_outputs=2>({x})
        {x}_1c = Mul({x}_1, cos)
        {x}_2s = Mul({x}_2, sin)
        {x}_2c = Mul({x}_2, cos)
        {x}_1s = Mul({x}_1, sin)
        {x}_first = Sub({x}_1c, {x}_2s)
        {x}_second = Add({x}_2c, {x}_1s)
        {x}_rotated = Concat<axis=-1>({x}_first, {x}_second)"""


def block_lines(i: int, read: str) -> str:
    """The nodes of one block, from ``read`` to ``layer{i}``."""
    b = f"layer{i}"
    heads = "\n".join(
        f"""
        {b}_{x}_wide = Reshape({b}_{x}_flat, split_heads)
        {b}_{x} = Transpose<perm=[0, 2, 1, 3]>({b}_{x}_wide)"""
        for x in "qkv"
    )
    return f"""{norm_lines(f"{b}_norm1", read)}
        {b}_parts = MatMul({b}_norm1_out, {b}_qkv)
        {b}_q_flat, {b}_k_flat, {b}_v_flat = Split<axis=-1, num_outputs=3>({b}_parts)
        {heads}{rotation_lines(f"{b}_q")}{rotation_lines(f"{b}_k")}
        present_{i}_key = Concat<axis=2>(past_{i}_key, {b}_k_rotated)
        present_{i}_value = Concat<axis=2>(past_{i}_value, {b}_v)
        {b}_keys = Transpose<perm=[0, 1, 3, 2]>(present_{i}_key)
        {b}_products = MatMul({b}_q_rotated, {b}_keys)
        {b}_scaled = Mul({b}_products, scale)
        {b}_scores = Add({b}_scaled, mask)
        {b}_shares = Softmax<axis=-1>({b}_scores)
        {b}_mixed = MatMul({b}_shares, present_{i}_value)
        {b}_by_position = Transpose<perm=[0, 2, 1, 3]>({b}_mixed)
        {b}_joined = Reshape({b}_by_position, join_heads)
        {b}_attended = MatMul({b}_joined, {b}_out)
        {b}_half = Add({read}, {b}_attended){norm_lines(f"{b}_norm2", f"{b}_half")}
        {b}_gates = MatMul({b}_norm2_out, {b}_gate)
        {b}_open = Sigmoid({b}_gates)
        {b}_silu = Mul({b}_gates, {b}_open)
        {b}_ups = MatMul({b}_norm2_out, {b}_up)
        {b}_gated = Mul({b}_silu, {b}_ups)
        {b}_downs = MatMul({b}_gated, {b}_down)
        {b} = Add({b}_half, {b}_downs)"""


def graph_text(options: Options) -> str:
    """The model in ONNX's text form, without its weights."""
    size = options.width // options.heads
    caches = [f"{i}_{kind}" for i in range(options.layers) for kind in ("key", "value")]
    shape = f"float[batch, {options.heads}, {{}}, {size}]"
    past = ", ".join(f"{shape.format('past')} past_{c}" for c in caches)
    present = ", ".join(f"{shape.format('total')} present_{c}" for c in caches)
    blocks = "".join(
        block_lines(i, f"layer{i - 1}" if i else "embedded") for i in range(options.layers)
    )
    return f"""<ir_version: 9, opset_import: ["" : 18]>
    decoder (int64[batch, length] input_ids, {past})
        => (float[batch, length, {BYTES}] logits, {present})
    <int64[1] last_axis = {{-1}}, float epsilon = {{{EPSILON}}},
     int64 zero = {{0}}, int64 one = {{1}}, int64[1] front = {{0}}, int64[1] back = {{1}},
     int64[4] split_heads = {{0, 0, {options.heads}, {size}}},
     int64[3] join_heads = {{0, 0, {options.width}}},
     float scale = {{{size**-0.5}}}, float open = {{0}}, float closed = {{-30000}}>
    {{
        past_shape = Shape<start=2, end=3>(past_0_key)
        past_length = Squeeze(past_shape, front)
        new_shape = Shape<start=1, end=2>(input_ids)
        new_length = Squeeze(new_shape, front)
        whole_length = Add(past_length, new_length)
        all_positions = Range(zero, whole_length, one)
        positions = Range(past_length, whole_length, one)
        row = Unsqueeze(all_positions, front)
        column = Unsqueeze(positions, back)
        seen = LessOrEqual(row, column)
        mask = Where(seen, open, closed)
        position = Cast<to=1>(column)
        angles = Mul(position, frequencies)
        cos = Cos(angles)
        sin = Sin(angles)
        embedded = Gather<axis=0>(embed, input_ids){blocks}
        {norm_lines("norm", f"layer{options.layers - 1}")}
        logits = MatMul(norm_out, head)
    }}"""


def model_of(weights: dict[str, np.ndarray], options: Options) -> onnx.ModelProto:
    """The decoder with these weights: one node a line of the text, named by its result."""
    model = onnx.parser.parse_model(graph_text(options))
    arrays = {
        **weights,
        "epsilon": np.float32(EPSILON),  # the text rounds numbers of few digits
        "scale": np.float32((options.width // options.heads) ** -0.5),
        "frequencies": frequencies(options.width // options.heads),
    }
    kept = [one for one in model.graph.initializer if one.name not in arrays]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()
    )
    for node in model.graph.node:
        node.name = f"{node.output[0]}:{node.op_type}"
    onnx.checker.check_model(model, full_check=True)
    return model


def texts_of(data: np.ndarray, length: int) -> Iterator[tuple[str, np.ndarray]]:
    """The inputs and the labels of pieces of text: [pieces, length], the next byte each."""
    count = (len(data) - 1) // length
    yield "input_ids", data[: count * length].reshape(count, length).astype(np.int64)
    yield "label", data[1 : count * length + 1].reshape(count, length).astype(np.int64)


def parse(arguments: list[str]) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train the decoder and write decoder.onnx, planted.onnx and texts.npz.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    here = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=here / "out", help="folder to write to")
    parser.add_argument("--text", type=Path, help="a text file to train on; default: help()'s")
    for field in fields(Options):
        if isinstance(field.default, int):
            parser.add_argument(f"--{field.name}", type=int, default=field.default, help=" ")
    return Options(**vars(parser.parse_args(arguments)))


def main(arguments: list[str]) -> int:
    """Train, export and save; returns 0."""
    options = parse(arguments)
    torch.manual_seed(options.seed)
    data = corpus(options.text)
    cut = int(len(data) * (1 - HELD_OUT))
    net = Decoder(options)
    train(net, torch.from_numpy(data[:cut].astype(np.int64)), options)
    weights = weights_of(net)
    options.out.mkdir(parents=True, exist_ok=True)
    onnx.save(model_of(weights, options), options.out / "decoder.onnx")
    other = planted(weights, options.layers, options.seed)
    onnx.save(model_of(other, options), options.out / "planted.onnx")
    texts = dict(texts_of(data[cut:], options.length))
    np.savez_compressed(options.out / "texts.npz", **texts)
    with torch.no_grad():
        logits = net(torch.from_numpy(texts["input_ids"][:32]))
    given = torch.from_numpy(texts["label"][:32])
    loss = float(functional.cross_entropy(logits.flatten(0, 1), given.flatten()))
    count = sum(parameter.numel() for parameter in net.parameters())
    print(f"{count / 1e6:.2f}M parameters; on held-out texts {loss:.4f} nats a byte")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
