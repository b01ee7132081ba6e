"""Mixed precision for PyTorch's training graphs: forward and backward planned together."""
