"""Other tools' interfaces, kept for their users."""
