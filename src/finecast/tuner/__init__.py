"""From data and a criterion to the fastest plan: analysis, search, study, artefacts."""
