"""Recurrent networks and a graph network, in PyTorch's own modules."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import nn

from zoo.network import Inputs, Network


class Tagger(nn.Module):
    """Two bidirectional recurrent layers between an embedding and a linear layer."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.body = kind(64, 64, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(128, 16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Tokens [batch, length] to logits [batch, length, 16]."""
        return self.head(self.body(self.embed(input_ids))[0])


def _tokens() -> Inputs:
    return {"input_ids": torch.randint(0, 256, (2, 20))}


def _tagger(name: str, kind: type[nn.RNNBase]) -> Network:
    return Network(name=name, library="torch", build=partial(Tagger, kind), inputs=_tokens)


NETWORKS: Final = (_tagger("lstm", nn.LSTM), _tagger("gru", nn.GRU), _tagger("rnn", nn.RNN))
