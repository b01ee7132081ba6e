"""Models of TensorFlow and Keras, in TensorFlow."""
