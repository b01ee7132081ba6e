"""What became of a model, and why: what costs accuracy, what differs, why ops have formats.

It looks at models and plans as they are, and searches nothing.
"""
