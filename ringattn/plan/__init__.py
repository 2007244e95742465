"""Masks, layouts, shardings and ring steps as integers: all that is known of a call before a byte moves."""
