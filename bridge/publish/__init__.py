"""From encoded events to acknowledged messages in the CDC stream."""
