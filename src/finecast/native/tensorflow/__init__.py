"""Models of TensorFlow and Keras opened, and run in TensorFlow."""
