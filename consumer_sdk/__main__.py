"""`python -m consumer_sdk` is the command `cdc`."""

from consumer_sdk.launch.commands import cdc

if __name__ == "__main__":
    cdc()
