"""The scope of an op, such as its layer, read from its name."""

from __future__ import annotations


def scope_of(name: str) -> str:
    """``encoder/layer0`` of ``encoder/layer0/MatMul``; empty where the name has no parts."""
    return name.rsplit("/", 1)[0].rsplit(".", 1)[0] if "/" in name or "." in name else ""
