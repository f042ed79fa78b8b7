"""`python -m bridge` is the command `bridge`."""

from tailrace.launch import bridge

if __name__ == "__main__":
    bridge()
