"""`python -m consumer_sdk` is the command `cdc`."""

from tailrace.launch import cdc

if __name__ == "__main__":
    cdc()
