"""Names on the wire: LSNs, message ids, subjects, tables in their three spellings."""

from __future__ import annotations

import pytest

from consumer_sdk.wire.errors import WireError
from consumer_sdk.wire.position import (
    MessageId,
    Position,
    format_lsn,
    message_id,
    parse_lsn,
    parse_message_id,
)
from consumer_sdk.wire.subjects import (
    Subjects,
    escape_token,
    format_table_name,
    parse_table_name,
    parse_table_token,
    table_token,
    unescape_token,
)


def test_an_lsn_reads_as_postgresql_prints_it() -> None:
    assert parse_lsn("16/B374D848") == 0x16B374D848
    assert format_lsn(0x16B374D848) == "16/B374D848"
    assert (parse_lsn("0/0"), format_lsn(0)) == (0, "0/0")
    assert parse_lsn("ffffffff/FFFFFFFF") == 2**64 - 1


@pytest.mark.parametrize(
    "text", ["", "16", "16/", "/1", "16/B374D848 ", "1/2/3", "g/0", "1" * 9 + "/0"]
)
def test_what_is_no_lsn_is_refused(text: str) -> None:
    with pytest.raises(WireError, match="not an LSN"):
        parse_lsn(text)


def test_positions_order_by_commit_then_ordinal() -> None:
    assert Position(1, 9) < Position(2, 0) < Position(2, 1)


def test_a_message_id_has_hexadecimal_lsn_and_epoch() -> None:
    text = message_id(0x16B374D848, "sales.orders", "INSERT", 12, 0x69000000)
    assert text == "16b374d848-sales.orders-insert-12-69000000"
    assert parse_message_id(text) == MessageId(
        0x16B374D848, "sales.orders", "insert", 12, 0x69000000
    )


def test_a_message_id_of_a_table_with_dashes_is_read_back() -> None:
    token = table_token("public", "a-b-insert-3")
    assert parse_message_id(message_id(1, token, "delete", 0, 2)).token == token


@pytest.mark.parametrize("text", ["", "x", "1-t-insert-1", "1-t-insert-x-1", "g-t-insert-1-1"])
def test_what_is_no_message_id_is_refused(text: str) -> None:
    with pytest.raises(WireError, match="not a message id"):
        parse_message_id(text)


@pytest.mark.parametrize(
    ("schema", "table", "token", "sql"),
    [
        ("public", "users", "users", "users"),
        ("sales", "orders", "sales.orders", "sales.orders"),
        ("sales", "Odd Table.1", "sales.Odd=20Table=2E1", 'sales."Odd Table.1"'),
        ("public", "a=b", "a=3Db", '"a=b"'),
        ("public", "é", "=C3=A9", '"é"'),
        ("public", 'say "hi"', "say=20=22hi=22", '"say ""hi"""'),
        ("$x", "*", "=24x.=2A", '"$x"."*"'),
        ("public", ">", "=3E", '">"'),
        ("PUBLIC", "t", "PUBLIC.t", '"PUBLIC".t'),
    ],
)
def test_a_table_in_its_three_spellings(schema: str, table: str, token: str, sql: str) -> None:
    assert table_token(schema, table) == token
    assert parse_table_token(token) == (schema, table)
    assert format_table_name(schema, table) == sql
    assert parse_table_name(sql) == (schema, table)


def test_unquoted_names_fold_as_in_postgresql() -> None:
    assert parse_table_name("Sales.Orders") == ("sales", "orders")
    assert parse_table_name(" Users ") == ("public", "users")
    # Only ASCII letters fold in a UTF-8 database.
    assert parse_table_name("ÉTÉ") == ("public", "ÉtÉ")


@pytest.mark.parametrize(
    "text", ["", ".", "a.", ".b", "a.b.c", "a b", '"', '""', '"a', "1a", "a;", "a.b;drop", "a-b"]
)
def test_what_is_no_table_name_is_refused(text: str) -> None:
    with pytest.raises(WireError, match="not a table name"):
        parse_table_name(text)


@pytest.mark.parametrize("token", ["a b", "a=", "=0", "=zz", "a.b", "=FF", "é", "=3d", "*", ""])
def test_what_is_no_escaped_name_is_refused(token: str) -> None:
    with pytest.raises(WireError):
        unescape_token(token)


def test_the_empty_name_has_a_token() -> None:
    assert unescape_token(escape_token("")) == ""


def test_a_token_of_three_parts_is_no_table() -> None:
    with pytest.raises(WireError, match="not a table token"):
        parse_table_token("a.b.c")


def test_names_without_a_prefix() -> None:
    names = Subjects()
    assert names.change("users", "insert") == "cdc.users.insert"
    assert names.table_filter("sales.orders") == "cdc.sales.orders.*"
    assert names.progress("slot") == "cdc.$progress.slot"
    assert names.fence("slot") == "cdc.$fence.slot"
    assert names.message("out.box") == "cdc.$message.out=2Ebox"
    assert names.snapshot_request("users") == "snapshot.request.users"
    assert names.snapshot_progress("users", "s1") == "snapshot.progress.users.s1"
    assert names.chunk("users", "s1", 0) == "init.snap.users.s1.0"
    assert names.meta("users") == "init.meta.users"
    assert names.error("users") == "init.error.users"
    assert (names.cdc_stream, names.init_stream) == ("CDC", "INIT")
    assert names.schemas_bucket == "schemas"
    assert names.bridge_bucket == "bridge"
    assert names.dicts_bucket == "zstd_dicts"
    assert names.objects_bucket == "cdc_objects"


def test_one_prefix_marks_everything() -> None:
    names = Subjects("x")
    assert names.change("users", "insert") == "x.cdc.users.insert"
    assert names.snapshot_request("users") == "x.snapshot.request.users"
    assert names.meta("users") == "x.init.meta.users"
    assert (names.cdc_stream, names.init_stream) == ("x_CDC", "x_INIT")
    assert names.objects_bucket == "x_cdc_objects"


@pytest.mark.parametrize("prefix", ["a.b", "a b", "*", ">", "$JS", "é", "a\n"])
def test_a_prefix_that_breaks_subjects_is_refused(prefix: str) -> None:
    with pytest.raises(WireError, match="prefix"):
        Subjects(prefix)


def test_a_change_subject_splits_into_table_and_operation() -> None:
    names = Subjects("x")
    assert names.split_change("x.cdc.sales.orders.delete") == ("sales.orders", "delete")
    assert names.split_change("x.cdc.users.schema") == ("users", "schema")
    for foreign in ("cdc.users.insert", "x.cdc.users", "x.cdc.$progress.s", "x.cdc.users.other"):
        assert names.split_change(foreign) is None
