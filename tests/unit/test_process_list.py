"""What `ps` may show of arguments that hold a password."""

from __future__ import annotations

import pytest

from consumer_sdk.launch.process_list import without_secrets


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("nats://u:secret@h:4222", "nats://u:***@h:4222"),
        ("--nats=nats://u:secret@h", "--nats=nats://u:***@h"),
        ("u:secret@h", "u:***@h"),
        ("--nats=u:secret@h", "--nats=u:***@h"),
        ("nats://secret@h", "nats://***@h"),
        ("nats://u:secret@a,nats://v:secret@b", "nats://u:***@a,nats://v:***@b"),
        ("nats://u:secret@a,v:secret@b", "nats://u:***@b"),
        ("nats://u:se@cret@h", "nats://u:***@h"),
        ("postgresql://u:secret@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u@h/d", "postgresql://u@h/d"),
        ("postgresql://h/d?user=u&password=secret&x=y", "postgresql://h/d?user=u&password=***&x=y"),
        ("host=h password=secret user=u", "host=h password=*** user=u"),
        ("host=h password = 'se cr\\'et' user=u", "host=h password = *** user=u"),
        ("host=h sslpassword=secret", "host=h sslpassword=***"),
        ("nats://u:s@h", "nats://u:*@h"),
        ("sqlite:///a.db", "sqlite:///a.db"),
        ('sales."Odd Table.1"', 'sales."Odd Table.1"'),
        ("/opt/me@home/bin/cdc", "/opt/me@home/bin/cdc"),
    ],
)
def test_a_password_is_shown_as_asterisks_in_the_same_length(given: str, shown: str) -> None:
    line = f"python\0cdc\0{given}\0--once\0".encode()
    hidden = without_secrets(line)
    assert len(hidden) == len(line)
    assert hidden.split(b"\0") == [
        b"python",
        b"cdc",
        shown.ljust(len(given)).encode(),
        b"--once",
        b"",
    ]
