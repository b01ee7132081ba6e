"""Training in PyTorch: the plan of forward and backward together."""
