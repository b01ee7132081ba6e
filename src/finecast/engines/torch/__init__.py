"""Compiled PyTorch as an engine."""
