"""The subcommands of `cdc`."""
