"""`python -m bridge` is the command `bridge`."""

import sys

if __name__ == "__main__":
    # Python looks in the working directory first, where anybody's modules may be.
    if not sys.flags.safe_path and sys.path[0] != __file__[: -len("/bridge/__main__.py")]:
        del sys.path[0]
    from consumer_sdk.launch.commands import bridge

    bridge()
