"""The commands of `cdc`, one module each."""
