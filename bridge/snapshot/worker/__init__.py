"""The processes that copy tables into chunks."""
