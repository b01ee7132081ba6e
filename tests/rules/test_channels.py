"""Facts of channels: those of parts merge to those of the whole."""

from __future__ import annotations

import numpy as np

from finecast.rules.facts import ChannelFacts


def test_channels_by_themselves() -> None:
    array = np.array([[[1.0, -3.0], [0.5, 2.0]], [[4.0, 0.0], [1.0, 1.0]]], np.float32)
    seen = ChannelFacts.of(array, 1)
    assert (seen.lowest.tolist(), seen.highest.tolist()) == ([-3, 0], [4, 2])
    assert seen.largest.tolist() == [4, 2]
    assert seen.power.tolist() == [26 / 4, 6.25 / 4]


def test_batches_merge() -> None:
    draw = np.random.default_rng(0)
    whole = draw.standard_normal((6, 5, 3)).astype(np.float32)
    parts = ChannelFacts.of(whole[:2], -2).merge(ChannelFacts.of(whole[2:], -2))
    seen = ChannelFacts.of(whole, -2)
    np.testing.assert_array_equal(parts.largest, seen.largest)
    np.testing.assert_array_equal(parts.lowest, seen.lowest)
    np.testing.assert_allclose(parts.power, seen.power, rtol=1e-12)


def test_an_empty_batch_shows_nothing() -> None:
    seen = ChannelFacts.of(np.zeros((0, 3), np.float32), -1)
    assert seen.largest.tolist() == [0, 0, 0]
    assert seen.power.tolist() == [0, 0, 0]
