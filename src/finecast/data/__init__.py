"""Data, metrics and criteria."""
