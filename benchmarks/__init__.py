"""Benchmarks: JSON lines with the machine they were made on."""
