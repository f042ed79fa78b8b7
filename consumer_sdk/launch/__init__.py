"""The start and the end of the three commands."""
