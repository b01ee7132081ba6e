"""What of the figures is not as it should be, and why: written by hand, for the report."""

from __future__ import annotations

from typing import Final

LEFT: Final = """## What is left"""
