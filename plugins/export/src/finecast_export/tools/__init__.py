"""A module for each tool; its function ``export`` writes a plan in the tool's words."""
