"""Interfaces of other tools, implemented by finecast, so that their users' code still runs."""
