"""Passwords among the arguments of a command."""

from __future__ import annotations

import pytest

from consumer_sdk.launch.commands import places_for_secrets

NATS = ["NATS_URL or NATS_CREDS"]
POSTGRES = ["PGPASSWORD or ~/.pgpass"]


@pytest.mark.parametrize(
    ("arguments", "places"),
    [
        (["--nats", "nats://u:secret@h:4222"], NATS),
        (["--nats=nats://u:secret@h"], NATS),
        (["--nats", "u:secret@h"], NATS),
        (["--nats", "nats://secret@h"], NATS),
        (["--nats", "nats://h, nats://u:secret@h"], NATS),
        (["--nats-url", "nats://a,u:secret@b"], NATS),
        (["--into", "postgresql://u:secret@h/d"], POSTGRES),
        (["--into=postgresql://u:secret@h/d"], POSTGRES),
        (["--rep", "postgres://u:se@cret@h/d"], POSTGRES),
        (["--source", "postgresql://h/d?user=u&password=secret"], POSTGRES),
        (["--source", "host=h sslpassword = secret"], POSTGRES),
        (["--database-url", "host=h password=x"], ["DATABASE_URL, PGPASSWORD or ~/.pgpass"]),
        (["--nats", "t@h", "--into", "postgresql://u:p@h/d"], NATS + POSTGRES),
        (["postgresql://u:secret@h/d"], POSTGRES),
        (["--json", "host=h password=secret"], POSTGRES),
        (["--once", "nats://u:secret@h"], NATS),
        (["--na", "nats://u:secret@h"], NATS),
        (["--na=nats://u:secret@h"], NATS),
        (["--conf", "spark.a=b", "public.password"], []),
        (["--", "postgresql://u:secret@h/d"], POSTGRES),
        (["--nats", "nats://h:4222"], []),
        (["--into", "postgresql://u@h/d"], []),
        (["--into", "postgresql://u:@h/d"], []),
        (["--into", "sqlite:///a:b@c.db"], []),
        (["users", 'sales."a:b@c"', "--once"], []),
        (["--nats"], []),
        ([], []),
    ],
)
def test_it_is_named_where_a_password_can_stand_instead(
    arguments: list[str], places: list[str]
) -> None:
    assert places_for_secrets(arguments) == places
