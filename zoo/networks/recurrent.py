"""Recurrent networks, a graph network and a translator, in PyTorch's own modules."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import nn

from zoo.network import Inputs, Network


class Tagger(nn.Module):
    """Two bidirectional recurrent layers between an embedding and a linear layer."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU | nn.RNN]) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.body = kind(64, 64, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(128, 16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Tokens [batch, length] to logits [batch, length, 16]."""
        return self.head(self.body(self.embed(input_ids))[0])


class GraphNet(nn.Module):
    """Two rounds of messages along edges, summed at their targets and averaged by degree."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 64)
        self.rounds = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 4)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Nodes [n, 16] and edges [2, m] of indices to logits [n, 4]."""
        source, target = edges[0], edges[1]
        one = torch.ones_like(target, dtype=nodes.dtype)
        degree = torch.zeros_like(nodes[:, 0]).index_add(0, target, one).clamp(min=1)
        x = self.embed(nodes)
        for layer in self.rounds:
            along_edges = layer(x)[source]
            messages = along_edges.new_zeros(x.shape).index_add(0, target, along_edges)
            x = torch.relu(x + messages / degree[:, None])
        return self.head(x)


class Translator(nn.Module):
    """``nn.Transformer``, whose encoder layers take a fast path in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.body = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
        self.head = nn.Linear(64, 256)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Tokens of both languages to logits [batch, length of target, 256]."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        source, target = self.embed(source), self.embed(target)
        return self.head(self.body(source, target, tgt_mask=mask, tgt_is_causal=True))


def _tokens() -> Inputs:
    return {"input_ids": torch.randint(0, 256, (2, 20))}


def _graph() -> Inputs:
    return {"nodes": torch.randn(12, 16), "edges": torch.randint(0, 12, (2, 40))}


def _pairs() -> Inputs:
    return {
        "source": torch.randint(0, 256, (2, 20)),
        "target": torch.randint(0, 256, (2, 12)),
    }


def _tagger(name: str, kind: type[nn.LSTM | nn.GRU | nn.RNN]) -> Network:
    return Network(name=name, library="torch", build=partial(Tagger, kind), inputs=_tokens)


NETWORKS: Final = (
    _tagger("lstm", nn.LSTM),
    _tagger("gru", nn.GRU),
    _tagger("rnn", nn.RNN),
    Network(name="graph_net", library="torch", build=GraphNet, inputs=_graph),
    Network(name="transformer", library="torch", build=Translator, inputs=_pairs),
)
