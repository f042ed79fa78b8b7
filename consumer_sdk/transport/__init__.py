"""Access to NATS for the bridge and the SDK: options, connection, JetStream calls."""
