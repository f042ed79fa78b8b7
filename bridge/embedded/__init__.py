"""Real PostgreSQL and NATS servers from Python wheels, for the demo and the tests."""
