"""finecast."""
