"""Measuring time and memory, and recording the environment of a measurement."""
