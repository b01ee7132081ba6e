"""Numbers: formats, and how they round."""
