"""From a framework's model to the neutral graph, and from edits back to the model."""
