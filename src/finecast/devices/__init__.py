"""Devices that are not here: their data sheets, how they compute, their compilers' options."""
