"""Models of any library that an engine loads and runs: the parts that frontends share."""
