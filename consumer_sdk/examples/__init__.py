"""Small programs on top of the SDK, run as `python -m consumer_sdk.examples.NAME`."""
