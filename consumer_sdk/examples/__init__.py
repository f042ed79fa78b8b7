"""Small programs that use the SDK, run as `python -m consumer_sdk.examples.NAME`."""
