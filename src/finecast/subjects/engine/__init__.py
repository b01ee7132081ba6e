"""Models that an engine runs here, whatever library they are of: what frontends share."""
