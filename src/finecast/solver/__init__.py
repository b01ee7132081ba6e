"""Solvers that choose a label (a format) for each unit at least cost."""
