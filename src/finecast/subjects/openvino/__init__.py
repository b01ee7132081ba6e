"""OpenVINO models as subjects of the pipeline."""
