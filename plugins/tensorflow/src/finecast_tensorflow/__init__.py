"""TensorFlow and Keras models in finecast."""
