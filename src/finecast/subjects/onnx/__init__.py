"""ONNX models as subjects of the pipeline."""
