"""The parts of the training job."""
