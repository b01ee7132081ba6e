"""Measuring time and memory, and keeping what was measured, with its environment."""
