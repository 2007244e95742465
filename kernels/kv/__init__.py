"""Keys and values in memory: packed to travel, and in pages."""
