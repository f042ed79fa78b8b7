"""Changes committed in PostgreSQL arrive on their subjects."""

from __future__ import annotations

from consumer_sdk.wire import Subjects
from tests.fixtures.stored import stored_events, stored_messages
from tests.fixtures.waiting import eventually


async def test_committed_rows_arrive_on_their_subjects(
    database, prefix, nats_client, bridge_process
):
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    database.publish("users")
    bridge_process()
    database.execute("INSERT INTO users VALUES (1, 'ada'), (2, 'bob')")
    database.execute("UPDATE users SET name = 'eve' WHERE id = 2")
    database.execute("DELETE FROM users WHERE id = 1")

    async def four():
        found = await stored_events(nats_client, prefix)
        return found if len(found) >= 4 else None

    events = await eventually(four)
    assert [(e.operation, e.data) for e in events] == [
        ("INSERT", {"id": 1, "name": "ada"}),
        ("INSERT", {"id": 2, "name": "bob"}),
        ("UPDATE", {"id": 2, "name": "eve"}),
        ("DELETE", {"id": 1}),
    ]
    assert [e.seq for e in events] == [0, 1, 0, 0]
    assert [e.last for e in events] == [False, True, True, True]
    stored = await stored_messages(nats_client, Subjects(prefix).cdc_stream)
    print([m.subject for m in stored])
