"""Opened models of all libraries, joined with what runs them."""
