"""`python -m bridge` is the command `bridge`."""

from tailrace.launch import bridge

bridge()
