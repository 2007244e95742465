"""Drop-in replacements for PyTorch's own attention modules and functions."""
