"""The choice of a label for each unit at least cost."""
