"""The formats in which OpenVINO keeps a KV cache, the keys and values of earlier calls.

Models state them, and so do sessions: both have these properties from here.
"""

from __future__ import annotations

from typing import Final

from finecast.numbers.formats import Format

KV_CACHES: Final = {
    Format.FP32: "f32",
    Format.BF16: "bf16",
    Format.FP16: "f16",
    Format.INT8: "u8",
}
"""OpenVINO's names of the types.

Codes have a scale and a zero point for some numbers of a token and a head.
"""
KV_CACHE: Final = "KV_CACHE_PRECISION"
"""OpenVINO's property for the type of keys and values alike."""
BEAM_INPUT: Final = "beam_idx"
"""The input by which OpenVINO's stateful decoders reorder texts in beam search: the text that
each row goes on with. Without a search it counts up from 0."""
# Each alone; in the mode ACCURACY they decide, and the property for both does not (2026.4).
_KEYS_AND_VALUES: Final = ("KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION")


def kv_cache_settings(fmt: Format) -> dict[str, str]:
    """OpenVINO's properties that have a KV cache kept in a format."""
    return dict.fromkeys((KV_CACHE, *_KEYS_AND_VALUES), KV_CACHES[fmt])
