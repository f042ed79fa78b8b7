"""`python -m bridge` is the command `bridge`."""

from consumer_sdk.launch.commands import bridge

if __name__ == "__main__":
    bridge()
