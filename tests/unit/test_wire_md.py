"""The page that describes the wire format: each of its examples is what it says."""

from __future__ import annotations

import doctest
import json
import re
from importlib.resources import files
from typing import Any

import pytest

import consumer_sdk
from bridge.snapshot.coordinator.requests import parse_request
from consumer_sdk.reading.progress import Progress
from consumer_sdk.snapshot.snapshot import SnapshotMeta
from consumer_sdk.wire.column_types import TableSchema
from consumer_sdk.wire.envelope import (
    JSON,
    KNOWN_OPERATIONS,
    MSGPACK,
    Event,
    decode_payload,
    encode,
    read_events,
)
from consumer_sdk.wire.position import parse_message_id
from consumer_sdk.wire.subjects import Subjects, escape_token, table_token

PAGE = files(consumer_sdk).joinpath("WIRE.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(match[1], match[2]) for match in FENCE.finditer(PAGE)]
EXAMPLES: list[tuple[str, dict[str, Any]]] = [
    (kind.removeprefix("json "), json.loads(text))
    for kind, text in BLOCKS
    if kind.startswith("json ")
]


def examples(kind: str) -> list[dict[str, Any]]:
    found = [document for name, document in EXAMPLES if name == kind]
    assert found, f"no example of {kind}"
    return found


def example(kind: str) -> dict[str, Any]:
    return examples(kind)[0]


def both_ways(document: dict[str, Any]) -> list[list[Event]]:
    """The events of a document written in each encoding."""
    return [
        read_events({"Content-Type": JSON}, encode(document, as_json=True)),
        read_events({"Content-Type": MSGPACK}, encode(document)),
    ]


def test_every_fence_is_an_example_that_is_checked() -> None:
    kinds = {kind for kind, _ in BLOCKS}
    assert kinds == {
        "pycon", "json event", "json commit", "json packed", "json reference", "json message",
        "json schema", "json progress", "json request", "json answer", "json chunk", "json meta",
    }  # fmt: skip


def test_what_the_page_computes_is_what_comes_out() -> None:
    source = "\n".join(text for kind, text in BLOCKS if kind == "pycon")
    test = doctest.DocTestParser().get_doctest(source, {"example": example}, "WIRE.md", None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    output: list[str] = []
    result = runner.run(test, out=output.append)
    assert result.attempted >= 15
    assert result.failed == 0, "".join(output)


@pytest.mark.parametrize("kind", ["event", "commit", "packed", "reference", "message"])
def test_events_of_the_page_are_read_in_both_encodings(kind: str) -> None:
    document = example(kind)
    from_json, from_msgpack = both_ways(document)
    assert from_json == from_msgpack
    event = from_json[-1]
    assert event.operation in KNOWN_OPERATIONS
    assert event.end_lsn > event.commit_lsn


@pytest.mark.parametrize("kind", ["event", "commit", "packed", "reference"])
def test_ids_and_subjects_of_the_page_follow_its_rules(kind: str) -> None:
    document = example(kind)
    token = table_token(document["schema"], document["table"])
    operation = document["operation"].lower()
    assert parse_message_id(document["msg_id"]) == (
        document["lsn"], token, operation, document["seq"], document["epoch"],
    )  # fmt: skip
    assert document["subject"] == Subjects().change(token, operation)


def test_the_change_on_the_page_has_every_part_it_explains() -> None:
    [event] = both_ways(example("event"))[0]
    assert (event.data, event.old) == ({"id": 2, "name": "Ada"}, {"id": 1})
    assert event.unchanged == ("biography",)
    assert event.last
    for field in example("event"):
        assert f"`{field}`" in PAGE, field


def test_the_commit_message_on_the_page_ends_the_same_transaction() -> None:
    change, commit = example("event"), example("commit")
    assert (change["lsn"], change["xid"], change["end_lsn"]) == (
        commit["lsn"], commit["xid"], commit["end_lsn"],
    )  # fmt: skip
    assert commit["seq"] == change["seq"] + 1 == commit["changes"]


def test_the_packed_rows_on_the_page_count_on() -> None:
    events = both_ways(example("packed"))[0]
    assert [(event.seq, event.last, event.raw) for event in events] == [
        (0, False, ()), (1, True, ("doc",)),
    ]  # fmt: skip


def test_the_reference_on_the_page_is_complete() -> None:
    [event] = both_ways(example("reference"))[0]
    assert event.ref is not None
    assert set(event.ref) == {"bucket", "name", "size", "sha256"}
    assert event.ref["bucket"] == Subjects().objects_bucket


def test_the_logical_message_on_the_page_has_its_own_ordinal() -> None:
    document = example("message")
    [event] = both_ways(document)[0]
    assert event.data == "order 7 was paid"
    assert document["subject"] == Subjects().message(document["prefix"])
    token = f"$message.{escape_token(document['prefix'])}"
    assert parse_message_id(document["msg_id"]).token == token


def test_the_schema_on_the_page_is_one() -> None:
    schema = TableSchema.from_document(example("schema"))
    assert [column.family for column in schema.columns] == ["int", "array"]
    assert schema.columns[1].element_family == "text"
    assert schema.columns[1].backfilled is True
    assert schema.to_document() == example("schema")


def test_the_progress_on_the_page_is_one() -> None:
    progress = Progress.from_document(example("progress"))
    assert (progress.lsn, progress.stream_seq, progress.gap) == (97500070000, 41207, None)


def test_requests_and_answers_of_the_page_are_understood_by_the_bridge() -> None:
    for document in examples("request"):
        body = encode(document, as_json=True)
        request = parse_request(body, None, as_json=False, zstd=False)
        assert request.asked == document
    assert [answer["ok"] for answer in examples("answer")] == [True, False]


def test_chunk_and_meta_of_the_page_belong_together() -> None:
    chunk, meta = example("chunk"), SnapshotMeta.from_document(example("meta"))
    assert decode_payload(None, encode(chunk)) == chunk
    assert (chunk["snapshot_id"], chunk["lsn"], chunk["epoch"]) == (
        meta.snapshot_id, meta.snapshot_lsn, meta.epoch,
    )  # fmt: skip
    assert meta.cdc_seq == 41300


def test_names_of_the_page_are_those_of_the_code() -> None:
    names = Subjects("x")
    for name in (
        names.cdc_stream, names.init_stream, names.schemas_bucket, names.bridge_bucket,
        names.dicts_bucket, names.objects_bucket,
    ):  # fmt: skip
        assert f"`{name}`" in PAGE
    plain = Subjects()
    for subject in (
        plain.change("{table}", "insert"), plain.change("{table}", "schema"),
        plain.change("{table}", "commit"), plain.progress("{source}"), plain.fence("{source}"),
        plain.snapshot_request("{table}"), plain.snapshot_progress("{table}", "{snapshot_id}"),
        plain.chunk("{table}", "{snapshot_id}", "{chunk}"), plain.meta("{table}"),
        plain.error("{table}"),
    ):  # fmt: skip
        assert f"`{subject}`" in PAGE
