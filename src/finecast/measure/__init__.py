"""Measuring: time, memory, accuracy, and the environment a figure was taken in."""
