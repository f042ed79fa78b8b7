"""Tables in the lake: Delta, positions, files."""
