"""The mathematics without a ring: partials and their merge, the online softmax, the reference and its error budget."""
