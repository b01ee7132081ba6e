"""A plugin with a verb and an engine."""
