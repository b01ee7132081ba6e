"""Data sets and feeds, users' functions, metrics, and the accuracy criterion."""
