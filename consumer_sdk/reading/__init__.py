"""Reading the CDC stream: without gaps, in order, decoded."""
