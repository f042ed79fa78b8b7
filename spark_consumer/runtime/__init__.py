"""Java, the Spark session, signals and logs."""
