"""Compiled PyTorch as an engine: sessions, costs of ops, and plans of captured modules."""
