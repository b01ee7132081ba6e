"""PyTorch modules and exported programs as subjects of the pipeline."""
