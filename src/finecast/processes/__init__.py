"""Processes of finecast's own: what kills one is an error in the process that asked."""
