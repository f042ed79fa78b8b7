"""What the bridge and the SDK share of NATS: options, connection, JetStream calls."""
