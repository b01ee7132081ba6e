"""PyTorch modules and exported programs, opened, and run compiled or as they are."""
