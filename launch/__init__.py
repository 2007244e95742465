"""Everything that starts processes or measures."""
