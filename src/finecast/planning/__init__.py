"""From permissions, costs and errors to plans, and from a plan to its casts."""
