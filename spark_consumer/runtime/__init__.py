"""Java, the Spark session, signals, a connection to NATS."""
