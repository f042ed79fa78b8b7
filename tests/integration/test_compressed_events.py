"""`--zstd-events`: compressed with a dictionary of the table's own, read by any reader."""

from __future__ import annotations

from consumer_sdk.wire import Subjects, read_events
from tests.fixtures.stored import stored_messages
from tests.fixtures.waiting import eventually


async def test_compressed_events_are_resumed_after_exactly(
    database, prefix, nats_client, bridge_process
):
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text, mail text, at time)")
    database.publish("users")
    process = bridge_process("--zstd-events")
    insert = (
        "INSERT INTO users SELECT i, 'user ' || i, 'user' || i || '@example.org', now()::time "
        "FROM generate_series(%s::int, %s::int) i"
    )
    subjects = Subjects(prefix)
    bucket = None

    async def rows_and_compressed():
        nonlocal bucket
        bucket = bucket or await nats_client.jetstream().key_value(subjects.dicts_bucket)
        rows, with_dictionary = [], 0
        dictionaries: dict[str, bytes] = {}
        for message in await stored_messages(
            nats_client, subjects.cdc_stream, subjects.change("users", "insert")
        ):
            name = message.headers.get("Cdc-Dict")
            if name:
                with_dictionary += 1
                if name not in dictionaries:
                    dictionaries[name] = (await bucket.get(name)).value
            events = read_events(message.headers, message.data, dictionaries)
            rows += [event.data["id"] for event in events]
        return rows, with_dictionary

    async def stored(count: int):
        found = await rows_and_compressed()
        return found if len(found[0]) >= count else None

    # The dictionary is trained beside the stream: go on until messages are compressed with it.
    count = with_dictionary = 0
    while with_dictionary < 100:
        assert count < 20_000, "no dictionary was made"
        database.execute(insert, [count + 1, count + 500])
        count += 500
        rows, with_dictionary = await eventually(lambda wanted=count: stored(wanted))
    assert rows == list(range(1, count + 1))

    process.kill()
    database.execute(insert, [count + 1, count + 500])
    bridge_process("--zstd-events")
    rows, _ = await eventually(lambda: stored(count + 500))
    assert rows == list(range(1, count + 501))
