"""Devices that are not here: their specifications, numerics and compilers' options."""
