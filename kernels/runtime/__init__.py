"""Launches, copies to the device, and modules that need Triton."""
