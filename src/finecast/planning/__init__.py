"""Chooses plans from permissions, costs and errors; derives a plan's casts."""
