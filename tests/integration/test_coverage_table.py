"""Every row of the table in OPERATIONS.md on what the log does not contain, on a real server.

Each row works on a table of its own, all of them while no bridge runs. A replica shows whether what
the bridge announced was enough.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fixtures.postgres import versions_since
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.cdc_log import CdcLog
    from tests.fixtures.postgres import Database

pytestmark = pytest.mark.quick_checks

GAP, NONE, UNSEEN = "gap", "no gap", "not seen"

ROOT = """
CREATE TABLE {t} (id int PRIMARY KEY, body text NOT NULL) PARTITION BY RANGE (id);
CREATE TABLE {t}_1 PARTITION OF {t} FOR VALUES FROM (0) TO (100);
CREATE TABLE {t}_2 PARTITION OF {t} FOR VALUES FROM (100) TO (200);
INSERT INTO {t} SELECT g, repeat('x', 100) FROM generate_series(90, 109) g
"""
LIKE = "CREATE TABLE {t}_3 (LIKE {t} INCLUDING ALL)"
FILL = "INSERT INTO {t}_3 SELECT g, 'new' FROM generate_series(200, 249) g"
ATTACH = "ALTER TABLE {t} ATTACH PARTITION {t}_3 FOR VALUES FROM (200) TO (300)"
PART = "CREATE TABLE {t}_3 PARTITION OF {t} FOR VALUES FROM (200) TO (300)"
INSERT = "INSERT INTO {t} SELECT g, 'new' FROM generate_series(200, 249) g"

# The work of a row: statements, each in a transaction of its own. A list of statements shares one;
# `1:` and `2:` before them choose one of two sessions. `SET` is what the publication says of the
# table from then on.
Work = list["str | list[str]"]

ROWS: dict[str, tuple[str, Work]] = {
    "`ATTACH PARTITION` of a table with rows": (GAP, [LIKE, FILL, ATTACH]),
    "the same in one transaction, with savepoints": (
        GAP,
        [[LIKE, "SAVEPOINT a", FILL, "RELEASE a", ATTACH]],
    ),
    "the same in a savepoint": (GAP, [[LIKE, "SAVEPOINT a", ATTACH, FILL, "RELEASE a"]]),
    "rows of a transaction that began after the one that attaches": (
        GAP,
        [LIKE, ["1: SELECT pg_current_xact_id()", f"2: {FILL}", f"1: {ATTACH}"]],
    ),
    "columns altered after the `ATTACH`": (
        GAP,
        [
            [LIKE, FILL, ATTACH, "ALTER TABLE {t}_3 ALTER body SET STATISTICS 7"],
            "ALTER TABLE {t}_3 ALTER id SET STATISTICS 7",
        ],
    ),
    "`ATTACH PARTITION` of a partitioned table with rows": (
        GAP,
        [
            "CREATE TABLE {t}_3 (LIKE {t}) PARTITION BY RANGE (id)",
            "CREATE TABLE {t}_33 PARTITION OF {t}_3 FOR VALUES FROM (200) TO (300)",
            FILL,
            ATTACH,
        ],
    ),
    "`ATTACH PARTITION` of an empty table, filled before the bridge looked": (
        GAP,
        [LIKE, ATTACH, INSERT],
    ),
    "`ATTACH PARTITION` of an empty table": (NONE, [LIKE, ATTACH]),
    "`CREATE TABLE … PARTITION OF`, filled before the bridge looked": (NONE, [PART, INSERT]),
    "the same in one transaction, with savepoints ": (
        NONE,
        [["SAVEPOINT a", PART, "RELEASE a", "SAVEPOINT b", INSERT, "RELEASE b"]],
    ),
    "partitions of a new partition": (
        NONE,
        [
            PART + " PARTITION BY RANGE (id)",
            'CREATE TABLE "{t} q%d%s" PARTITION OF {t}_3 FOR VALUES FROM (200) TO (300)',
            INSERT,
        ],
    ),
    "`DETACH PARTITION`, `DROP TABLE` of a partition": (
        GAP,
        ["ALTER TABLE {t} DETACH PARTITION {t}_1"],
    ),
    "`DETACH` and `ATTACH` again": (
        GAP,
        [
            "ALTER TABLE {t} DETACH PARTITION {t}_1",
            "INSERT INTO {t}_1 VALUES (1, 'unseen')",
            "ALTER TABLE {t} ATTACH PARTITION {t}_1 FOR VALUES FROM (0) TO (100)",
        ],
    ),
    "`TRUNCATE` of a partition": (GAP, ["TRUNCATE {t}_1"]),
    "`TRUNCATE` of a partition, rows inserted again": (
        GAP,
        ["TRUNCATE {t}_1", "INSERT INTO {t} VALUES (90, 'again')", "ANALYZE {t}_1"],
    ),
    "`TRUNCATE` of a new partition that had rows": (GAP, [PART, INSERT, "TRUNCATE {t}_3"]),
    "`TRUNCATE` of the whole table": (NONE, ["TRUNCATE {t}", "INSERT INTO {t} VALUES (1, 'new')"]),
    "`VACUUM FULL`, `CLUSTER` of a partition": (
        NONE,
        ["VACUUM FULL {t}_1", "CLUSTER {t}_2 USING {t}_2_pkey", "VACUUM FULL {t}_2"],
    ),
    "a column rewritten (`ALTER COLUMN … TYPE … USING`)": (
        GAP,
        ["ALTER TABLE {t} ALTER body TYPE text USING upper(body)"],
    ),
    "a partition that was `UNLOGGED` for a while": (
        GAP,
        [
            "ALTER TABLE {t}_1 SET UNLOGGED",
            "INSERT INTO {t} VALUES (1, 'unseen')",
            "ALTER TABLE {t}_1 SET LOGGED",
        ],
    ),
    "rows moved between partitions, written to a partition by its name": (
        NONE,
        ["UPDATE {t} SET id = id + 100 WHERE id = 90", "DELETE FROM {t}_1 WHERE id = 91"],
    ),
    "a row filter changed": (GAP, ["SET WHERE (id > 95)"]),
    "a column list changed": (GAP, ["SET (id)"]),
    "a table taken out of the publication and put back": (
        GAP,
        [
            "ALTER PUBLICATION pub DROP TABLE {t}",
            "INSERT INTO {t} VALUES (1, 'unseen')",
            "ALTER PUBLICATION pub ADD TABLE {t}",
        ],
    ),
    "a table renamed and renamed back": (
        GAP,
        [
            "ALTER TABLE {t} RENAME TO {t}_other",
            "INSERT INTO {t}_other VALUES (1, 'unseen')",
            "ALTER TABLE {t}_other RENAME TO {t}",
        ],
    ),
    "writes to an `UNLOGGED` partition": (
        UNSEEN,
        [PART.replace("CREATE TABLE", "CREATE UNLOGGED TABLE"), INSERT],
    ),
    "`TRUNCATE` of a partition by the transaction that created it, after rows": (
        UNSEEN,
        [[PART, INSERT, "TRUNCATE {t}_3"]],
    ),
    "`TRUNCATE` of a partition by the transaction that truncated the whole table, after rows": (
        UNSEEN,
        [["TRUNCATE {t}", "INSERT INTO {t} VALUES (1, 'gone')", "TRUNCATE {t}_1"]],
    ),
}
ELSEWHERE = {
    "options of the publication, set and reset": GAP,
}
"""Rows that concern every table, with tests of their own in test_coverage.py."""


def do(database: Database, table: str, work: Work) -> None:
    """Run the work of one row."""
    with database.connect() as first, database.connect() as second:
        sessions: dict[str, psycopg.Connection[Any]] = {"1": first, "2": second}
        for step in work:
            if isinstance(step, str):
                first.execute(step.format(t=table))
                continue
            with first.transaction():
                for statement in step:
                    session, colon, text = statement.partition(": ")
                    chosen, text = (sessions[session], text) if colon else (first, statement)
                    chosen.execute(text.format(t=table))


@pytest.mark.timeout(300)
@versions_since(15)
async def test_what_the_log_does_not_contain_is_announced_as_the_table_says(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    cdc: CdcLog,
    run_command: Callable[..., Any],
    prefix: str,
    tmp_path: Path,
) -> None:
    tables = {f"t{number}": row for number, row in enumerate(ROWS.values())}
    for table in tables:
        database.execute(ROOT.format(t=table))
    database.publish(*tables, options="publish_via_partition_root = true")
    # The bridge may read the roots and no partition.
    dsn = database.role("LOGIN REPLICATION")
    database.execute(f"GRANT SELECT ON {', '.join(tables)} TO {database.roles[0]}")
    bridge = bridge_process(database_url=dsn)
    await eventually(lambda: cdc.kept_coverage(f"slot_{database.name}"))
    replica = f"sqlite:///{tmp_path / 'replica.db'}"

    def run(*arguments: str) -> Any:
        return run_command("cdc", *arguments, environment={"BRIDGE_PREFIX": prefix})

    # After a gap a mirror takes a new snapshot; only the other tables could hide a mistake.
    followed = [table for table, (outcome, _) in tables.items() if outcome != GAP]
    mirror = ("mirror", *followed, "--into", replica, "--once")
    done = run(*mirror)
    assert done.returncode == 0, done.stderr
    bridge.kill()
    said = []
    for table, (_, work) in tables.items():
        of_publication = [step[4:] for step in work if isinstance(step, str) and step[:4] == "SET "]
        said.append(" ".join([table, *of_publication]))
        if not of_publication:
            do(database, table, work)
    database.execute(f"ALTER PUBLICATION pub SET TABLE {', '.join(said)}")

    async def gaps() -> set[str]:
        found = [record["gap"] for record in await cdc.progress() if record["gap"]]
        return {table for gap in found for table in gap["tables"]}

    bridge_process(database_url=dsn)
    announced = await eventually(gaps)
    texts = dict(zip(tables, ROWS, strict=True))
    assert {texts[table] for table in announced} == {
        text for text, (outcome, _) in ROWS.items() if outcome == GAP
    }
    done = run(*mirror)
    assert done.returncode == 0, done.stderr
    unseen = [table for table, (outcome, _) in tables.items() if outcome == UNSEEN]
    for compared in ([table for table in followed if table not in unseen], *([t] for t in unseen)):
        done = run("verify", *compared, "--source", database.dsn, "--replica", replica)
        assert done.returncode == int(compared[0] in unseen), done.stdout


def test_the_table_in_the_manual_has_exactly_these_rows() -> None:
    manual = (Path(__file__).parents[2] / "OPERATIONS.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")[:2]]
        for line in manual.splitlines()
        if line.startswith("| ")
    ]
    said = [(what, outcome) for what, outcome in rows if outcome in (GAP, NONE, UNSEEN)]
    tested = [(what.strip(), outcome) for what, (outcome, _) in ROWS.items()]
    assert sorted(said) == sorted([*tested, *ELSEWHERE.items()])
