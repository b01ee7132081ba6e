"""What a network of the zoo is before it is run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from torch import nn

from zoo.in_torch import Peer
from zoo.network import without_dropout
from zoo.outcome import StageError, Status


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


@pytest.mark.parametrize(
    ("error", "peer", "whose"),
    [(float("nan"), float("nan"), Status.ENGINE), (float("nan"), 0.01, Status.FINECAST)],
)
def test_nan_that_the_peer_gives_too_is_not_finecast_s(
    error: float, peer: float, whose: Status
) -> None:
    with pytest.raises(StageError) as caught:
        Peer(error=peer, name="autocast's").check(error, "gradients, all:bf16")
    assert caught.value.status is whose
