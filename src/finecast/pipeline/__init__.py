"""The verbs: tune, convert, apply, ladder."""
