"""Pure decoding of logical replication: frames, and the pgoutput messages inside them."""
