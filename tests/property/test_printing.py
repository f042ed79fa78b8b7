"""Names that others chose reach a terminal, a log line and printed SQL only in escaped form."""

from __future__ import annotations

import json
import logging
import re
from urllib.parse import quote

from hypothesis import example, given
from hypothesis import strategies as st

from bridge.postgres.publication import Identity, Publication, PublishedTable
from bridge.preflight.findings import format_json, format_text
from bridge.preflight.publication import check_publication
from bridge.preflight.server import ServerFacts, check_server
from bridge.preflight.setup_sql import setup_sql
from bridge.preflight.slot import SlotFacts, check_slots
from bridge.telemetry.wal_monitor import OpenTransaction
from consumer_sdk.targets.target_url import display_url
from consumer_sdk.transport.logfmt import JsonFormatter, LogfmtFormatter, mask_secrets
from consumer_sdk.transport.options import without_secrets
from consumer_sdk.wire.escaping import printable, printable_json, sql_identifier, sql_literal
from consumer_sdk.wire.subjects import format_table_name, parse_table_name

ODD = [
    "\n\\! touch x\n", "'; DROP TABLE t; --", '"; DROP TABLE t; --', "$setup$", "$setup1$", "$$",
    "\x1b[31m", "\x1b]0;title\x07", "\r", "\x9b2J", "\u202e", "\u200b", "\u2028", "\\", "*/", "--",
    "\x00".replace("\x00", "\x01"), "%s", "%%", "{}", ":x", ":'x'", "U&", "\U000e0041", "\x7f",
]  # fmt: skip
# Controls, line ends, changes of direction, invisible characters, lone surrogates.
CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]"
)
names = (
    st.lists(st.one_of(st.sampled_from(ODD), st.text(max_size=6)), min_size=1, max_size=6)
    .map("".join)
    .map(lambda text: text.replace("\0", "").encode(errors="ignore")[:63].decode(errors="ignore"))
    .filter(bool)
)


def published(schema: str, table: str, column: str) -> PublishedTable:
    """A table with everything wrong that `bridge check` reports."""
    return PublishedTable(
        1, schema, table, is_partitioned=True, schema_usable=False, selectable=False,
        row_security=True, row_filter="(true)", filter_columns=[column], listed_columns=[],
        unpublished_generated=[column],
        identities=[Identity(schema, table, "n", ()), Identity(schema, table, "i", (column,))],
    )  # fmt: skip


def facts(role: str, database: str) -> ServerFacts:
    return ServerFacts(
        version=180000, version_text=role, wal_level=role, senders_free=0, senders=1, slots_free=0,
        slots=1, wal_keep="-1", idle_slot_timeout=role, encoding="SQL_ASCII", in_recovery=True,
        role=role, database=database, may_replicate=False, sees_statistics=False,
        slot_exists=False, slot_active=False, awaited_standbys=role, syncs_slots=True,
        has_feedback=False, primary_slot="", primary_conninfo=role, effective_wal_level=role,
    )  # fmt: skip


def is_clean(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@given(names, names, names, names)
def test_the_report_of_the_check_shows_no_control_character(
    role: str, schema: str, table: str, publication: str
) -> None:
    known = facts(role, schema)
    described = Publication(
        publication, False, True, ("truncate",), ((schema, table),),
        (published(schema, table, role),),
    )  # fmt: skip
    slot = SlotFacts(table, "physical", "", schema, False, False, "lost", role, False, 2**40, 2**40)
    findings = check_server(known) + check_publication(described, publication, known)
    findings += check_publication(None, publication, known)
    findings += check_slots([slot], table, known, 1) + check_slots([slot], "other", known, 1)
    text = format_text(findings)
    assert is_clean(text)
    document = json.loads(format_json(findings))
    assert not CONTROL.search(format_json(findings).replace("\n", ""))
    for finding in document["findings"]:
        # Every line of a fix is a statement or a comment; none begins with what a name holds.
        for line in finding["fix"].split("\n"):
            assert line.isprintable()
            assert not line.startswith("\\")


@given(names, names)
def test_names_are_written_on_one_line_and_read_back(schema: str, table: str) -> None:
    for written in (sql_identifier(schema, table), sql_literal(table), printable(table)):
        assert written.isprintable()
    written = format_table_name(schema, table)
    assert written.isprintable()
    assert parse_table_name(written) == (schema, table)
    assert parse_table_name(sql_identifier(schema, table)) == (schema, table)
    assert OpenTransaction(None, table).end_statement.isprintable()
    assert OpenTransaction(None, table).who.isprintable()


@given(names, names, names, names)
def test_the_set_up_is_printable_and_ends_its_dollar_quotes_itself(
    role: str, database: str, publication: str, table: str
) -> None:
    script = setup_sql(
        role=role, database=database, publication=publication, tables=[("public", table)]
    )
    assert is_clean(script)
    for tag in re.findall(r"^DO (\$\w+\$) BEGIN$", script, re.MULTILINE):
        body = script.partition(f"DO {tag} BEGIN")[2].partition(f"END {tag};")[0]
        assert tag not in body


@given(st.text(), st.text())
@example("\U000e0041", "\ud800")
def test_a_log_line_is_one_printable_line(text: str, name: str) -> None:
    record = logging.LogRecord("bridge", logging.INFO, "", 0, text.replace("%", "%%"), (), None)
    record.fields = {name or "x": name, "n": 1}
    assert LogfmtFormatter().format(record).isprintable()
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert not CONTROL.search(line)
    assert json.loads(line)["n"] == 1


@given(st.text())
def test_printable_json_means_the_same(text: str) -> None:
    document = json.dumps([text], ensure_ascii=False)
    assert json.loads(printable_json(document)) == [text]


secret = st.text("aZ9/?#%@:&=+.,!$*()'\"\\", min_size=2, max_size=12).map(
    lambda end: f"s3cret{end}"
)


@given(secret)
def test_a_secret_is_masked_in_every_form(password: str) -> None:
    at_end = password.rstrip("@")
    forms = [
        f"nats://{at_end.replace(':', '')}@h:4222",
        f"nats://u:{password}@h:4222,tls://v:{password}@k",
        f"cannot reach postgresql://u:{password}@h/db?sslmode=require: refused",
        f"address u:{password}@h:4222 is wrong",
        f"host=h password={password} dbname=d",
        f"PGPASSWORD={password} psql",
        f'{{"password": {json.dumps(password)}, "user": "u"}}',
        "password='" + password.replace("\\", "\\\\").replace("'", "\\'") + "'",
        f"options='-c app.secret={password}'",
        f"token={password}",
        f"Authorization: Bearer {password}",
    ]
    for text in forms:
        assert "s3cret" not in mask_secrets(text), text


@given(secret)
def test_an_address_is_shown_without_any_part_of_its_password(password: str) -> None:
    for scheme in ("postgresql", "nats", "tls"):
        for user in ("u:", ""):
            shown = display_url(f"{scheme}://{user}{password}@h:1/db?password={password}")
            assert "s3cret" not in shown
            plain = quote(password, safe="/")
            shown = display_url(f"{scheme}://{user}{plain}@h:1/db?password={plain}")
            assert shown == f"{scheme}://h:1/db"
    assert without_secrets(f"u:{quote(password)}@h:1") == "h:1"
    assert display_url("sqlite:////data/a@b.db") == "sqlite:////data/a@b.db"
