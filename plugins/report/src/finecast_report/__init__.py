"""Reports of finecast: pages, files for Model Explorer, pictures."""
