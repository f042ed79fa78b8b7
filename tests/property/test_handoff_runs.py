"""Runs of like events are taken together: the same must come of it as of each event alone."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from consumer_sdk.mirror.decisions import Alter, Apply, Promote, RepairNeeded, Save
from consumer_sdk.mirror.handoff import HandOff
from consumer_sdk.reading.decoder import Stored
from consumer_sdk.targets.target import CopyState, TargetState
from consumer_sdk.wire.envelope import Event
from tests.mirror_model import CREATED, table_schema
from tests.property.test_handoff_properties import ALL, TABLES, make_sources

FIRST_LSN, LAST_LSN = 100, 1000


def random_events(data: Random) -> list[Event]:
    """Transactions of two sources, interleaved, with what a stream may hold besides."""
    queues: list[list[Event]] = []
    for source, tables in TABLES.items():
        queue: list[Event] = []
        version = dict.fromkeys(tables, 1)
        for lsn in sorted(data.sample(range(FIRST_LSN, LAST_LSN), data.randint(1, 8))):
            strange = data.choices([("public", "foreign"), data.choice(ALL)], [9, 1])[0]
            queue += random_transaction(source, lsn, [*tables, strange], version, data)
        queues.append(queue)
    mixed: list[Event] = []
    while any(queues):
        queue = data.choice([queue for queue in queues if queue])
        count = data.randint(1, len(queue))
        mixed += queue[:count]
        del queue[:count]
    # A bridge that died says the newest again; positions tell.
    for _ in range(data.choice([0, 0, 1, 3])):
        place = data.randrange(len(mixed))
        length = data.randint(1, 4)
        mixed[place + length : place + length] = mixed[place : place + length]
    # What must not happen, but would have to be noticed: an end that is missing.
    ends = [place for place, one in enumerate(mixed) if one.last]
    if data.random() < 0.4:
        del mixed[data.choice(ends)]
    return mixed


def random_transaction(
    source: str, lsn: int, tables: list[Any], version: dict[Any, int], data: Random
) -> list[Event]:
    events: list[Event] = []
    epoch = data.choices([1, 0, 2], [60, 3, 1])[0]
    seq = 0

    def add(table: Any, operation: str, **fields: Any) -> None:
        nonlocal seq
        counted = operation not in ("SCHEMA", "PROGRESS", "MESSAGE")
        events.append(
            Event(
                source=source, epoch=epoch, table=table[1], schema=table[0], operation=operation,
                commit_lsn=lsn, seq=seq, xid=1, ts=0, schema_version=version.get(table, 1),
                relation_id=data.choices([1, 2], [80, 1])[0], msg_id="", subject="", **fields,
            )
        )  # fmt: skip
        seq += counted

    # Few, so that transactions often resemble the one before.
    tables = data.sample(tables, data.randint(1, 2))
    for _ in range(data.randint(1, 3)):
        table, operation = data.choice(tables), data.choice(["INSERT", "DELETE"])
        for _ in range(data.randint(1, 5)):
            add(table, operation)
            if data.random() < 0.01:
                # A version that nobody announced.
                version[table] = version.get(table, 1) + 1
        if table in version and data.random() < 0.1:
            version[table] += 1
            add(table, "SCHEMA", document=schema_document(source, table, version[table]))
        if data.random() < 0.1:
            add(("", ""), "MESSAGE")
    counted = [one for one in events if one.operation in ("INSERT", "DELETE")]
    counted[-1].last = True
    if data.random() < 0.5:
        add(events[0].schema and (events[0].schema, events[0].table), "COMMIT")
    if data.random() < 0.2:
        add(("", ""), "PROGRESS", document={"lsn": lsn + 1, "gap": None})
    return events


def schema_document(source: str, table: Any, version: int) -> dict[str, Any]:
    """Another version of the same structure, now and then with another default."""
    made = table_schema(table[1], source=source, version=version)
    return made.to_document() | {"operation": "SCHEMA"}


def decided(machine: HandOff, batches: list[list[Stored]]) -> dict[Any, Any]:
    """What happens to each table, in order, the last positions, and how it ended."""
    found: dict[Any, Any] = {"positions": {}}
    try:
        for batch in batches:
            for action in machine.advance(batch):
                note(found, action)
    except RepairNeeded as needed:
        found["ended"] = (needed.reason, needed.tables, needed.snapshot_lsn)
        # What was decided in the batch that broke is not performed, so only the end compares.
        return {"ended": found["ended"]}
    found["applied"] = machine.events_applied
    if machine.is_open:
        # How much of a transaction without its end is written already depends on the batches.
        return {"open": True, "discovered": machine.discovered}
    found["discovered"] = machine.discovered
    return found


def note(found: dict[Any, Any], action: Any) -> None:
    match action:
        case Apply(copy, events):
            found.setdefault(copy.name, []).extend((e.commit_lsn, e.seq) for e in events)
        case Alter(copy, schema):
            found.setdefault(copy.name, []).append(("alter", schema.schema_version))
        case Promote(copies):
            for copy in copies:
                found.setdefault(copy.name, []).append("shown")
        case Save(positions, _):
            found["positions"].update({p.source: p for p in positions})


@settings(max_examples=400, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32))
def test_batches_decide_what_single_events_decide(seed: int) -> None:
    data = Random(seed)
    _, sources = make_sources()
    followed = data.sample(ALL, data.randint(1, len(ALL)))
    copies = [
        source.snapshot(table, data.randint(1, LAST_LSN + 100), 1)[0].become(CopyState.CATCHING_UP)
        for name, source in sources.items()
        for table in followed
        if table in TABLES[name]
    ]
    stored = [Stored(number, one) for number, one in enumerate(random_events(data), start=1)]
    spill_events = data.choice([0, 3, 1000])

    def machine() -> HandOff:
        state = TargetState(copies=list(copies))
        return HandOff(state, CREATED, discover=True, spill_events=spill_events)

    batches = []
    rest = [Stored(item.stream_seq, replace(item.event)) for item in stored]
    while rest:
        size = data.randint(1, 30)
        batches.append(rest[:size])
        rest = rest[size:]
    together = decided(machine(), batches)
    alone = decided(machine(), [[item] for item in stored])
    event("ended early" if "ended" in together else "to the end")
    assert together == alone
