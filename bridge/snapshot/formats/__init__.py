"""COPY data turned into the chunks of a snapshot."""
