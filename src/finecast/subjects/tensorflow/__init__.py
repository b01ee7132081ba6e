"""Models of TensorFlow and Keras as subjects of the pipeline, run in TensorFlow."""
