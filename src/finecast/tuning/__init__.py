"""The verbs tune, ladder and emulate over a subject, and what each verb reports."""
