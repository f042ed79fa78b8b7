"""Readers of the CDC stream: every event once, in order, or GapError."""
