"""What a network of the zoo is before it is run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from torch import nn

from zoo.network import without_dropout


class Encoder(nn.Module):
    """Leaves layers out at random, as its configuration says."""

    config: SimpleNamespace
    dropout: nn.Dropout

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(layerdrop=0.1, hidden_size=4)
        self.dropout = nn.Dropout(0.5)


def test_nothing_is_left_out_at_random() -> None:
    net = Encoder()
    config, dropout = net.config, net.dropout
    without_dropout(net)
    assert vars(config) == {"layerdrop": 0.0, "hidden_size": 4}
    assert dropout.p == 0.0
