"""The tables of the lake: their columns, positions and files, and the records beside them."""
