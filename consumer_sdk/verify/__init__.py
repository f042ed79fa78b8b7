"""Source and replica compared row by row at one position."""
