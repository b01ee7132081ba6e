"""The Neuron compilers' precision options, as neuronx-cc and neuron-cc take them."""
