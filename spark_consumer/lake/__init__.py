"""The tables of the lake: their columns, positions and files, and the records of the job."""
