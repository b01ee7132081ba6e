"""Reading a framework's model as the neutral graph, and making a plan's edits in it."""
