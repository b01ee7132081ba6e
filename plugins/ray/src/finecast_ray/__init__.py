"""Evaluations of finecast on the machines of a Ray cluster."""
