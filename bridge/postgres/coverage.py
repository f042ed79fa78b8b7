"""Reads from the catalog what a publication covers of each table.

It also reads OIDs, files, and the transactions that last wrote the catalog's rows. They show that
something was changed and changed back between two reads.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from bridge.errors import SourceError
from bridge.postgres.publication import FILTERS_VERSION
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from bridge.postgres.catalog import Catalog
    from bridge.postgres.publication import PublicationReader

SHAPES = 4
"""The most column digests that are kept of a table."""

_ALWAYS = ("schema", "table", "publication", "operations", "relation_id")

_OPERATIONS = ["pubinsert", "pubupdate", "pubdelete", "pubtruncate"]
_PUBLICATION = """
SELECT oid::int8, puballtables, xmin::text::int8,
       pg_catalog.hashtextextended((pg_catalog.to_jsonb(p) - %s::text[])::text, 0),
       pubinsert, pubupdate, pubdelete, pubtruncate
FROM pg_catalog.pg_publication p WHERE pubname = %s
"""

_TABLES = """
SELECT t.schemaname, t.tablename, c.oid::int8, c.relkind = 'p',
       ARRAY[y.xmin::text::int8, c.relowner::int8],
       pg_catalog.array_remove(ARRAY[r.oid, {entry}]::int8[], NULL),
       {filter}, {columns}, CASE WHEN r.oid IS NULL THEN c.reltoastrelid::int8 ELSE 0 END
FROM pg_catalog.pg_publication_tables t
JOIN pg_catalog.pg_namespace n ON n.nspname = t.schemaname
JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
JOIN pg_catalog.pg_type y ON y.oid = c.reltype
JOIN pg_catalog.pg_publication p ON p.pubname = t.pubname
LEFT JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid
{schemas}
WHERE t.pubname = %s
"""
_SCHEMAS = """
LEFT JOIN pg_catalog.pg_publication_namespace s ON s.pnpubid = p.oid AND s.pnnspid = n.oid
"""

# Digests save space in KV, which holds them for every table. A column number is never reused.
_COLUMNS = """
SELECT c.oid::int8,
       pg_catalog.hashtextextended(pg_catalog.string_agg(
           pg_catalog.concat_ws(' ', a.atttypid, a.atttypmod, a.attname), ',' ORDER BY a.attnum),
           0),
       pg_catalog.hashtextextended(pg_catalog.string_agg(a.attnum::text, ',' ORDER BY a.attnum),
           0),
       pg_catalog.hashtextextended(pg_catalog.string_agg(a.xmin::text, ',' ORDER BY a.attnum), 0),
       c.relfilenode::int8
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.oid = ANY(%s::oid[])
GROUP BY c.oid, c.relfilenode
"""

_LEAVES = """
SELECT r.oid::int8, c.oid::int8, c.relkind = 'r', c.relfilenode::int8, c.xmin::text::int8,
       i.xmin::text::int8, pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::text::int8
FROM pg_catalog.unnest(%s::oid[]) AS r(oid)
CROSS JOIN LATERAL pg_catalog.pg_partition_tree(r.oid) AS t
JOIN pg_catalog.pg_class c ON c.oid = t.relid
JOIN pg_catalog.pg_inherits i ON i.inhrelid = c.oid
WHERE c.relkind IN ('r', 'p') AND c.oid <> r.oid
"""

_ANCESTORS = """
SELECT l.oid::int8, i.inhrelid::int8, i.xmin::text::int8
FROM pg_catalog.unnest(%s::oid[]) AS l(oid)
CROSS JOIN LATERAL pg_catalog.pg_partition_ancestors(l.oid) AS a
JOIN pg_catalog.pg_inherits i ON i.inhrelid = a.relid
"""

# CREATE TABLE … PARTITION OF inserts the columns before the row of pg_inherits, in one transaction.
# ATTACH PARTITION replaces all columns in the command that inserts the row. So a column that is
# older than the row proves that the partition was created as one, and had no rows before. xmin of
# the partition's rows proves nothing: a transaction that wrote to the table before the ATTACH may
# have a later xid than the one that attached it, and so has every subtransaction. A new table's
# file has the number of the table.
_UNPROVEN = """
SELECT l.oid::int8, pg_catalog.pg_relation_size(c.oid) > 0 AND EXISTS (
    SELECT FROM pg_catalog.pg_partition_ancestors(c.oid) AS a
    JOIN pg_catalog.pg_inherits i ON i.inhrelid = a.relid
    WHERE i.inhrelid = ANY(%s::oid[]) AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_attribute k
        WHERE k.attrelid = i.inhrelid AND k.attnum > 0 AND NOT k.attisdropped AND k.xmin = i.xmin
          AND k.cmin::text::int8 < i.cmin::text::int8
          AND k.xmax = '0'::pg_catalog.xid AND i.xmax = '0'::pg_catalog.xid))
FROM pg_catalog.unnest(%s::oid[]) AS l(oid)
JOIN pg_catalog.pg_class c ON c.oid = l.oid
"""

_READABLE = """
SELECT pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(c.relname),
       pg_catalog.has_table_privilege(c.oid, 'SELECT')
       AND pg_catalog.has_schema_privilege(n.oid, 'USAGE')
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = %s::oid
"""

# The limit of ctid keeps the scan short, also that of other partitions below a root. Ages are
# comparable as long as the xid is not half of all xids away.
_OLDER_ROW = """
SELECT EXISTS (
    SELECT 1 FROM {table} AS r
    WHERE r.tableoid = %s::oid AND r.ctid < '({blocks},0)'::pg_catalog.tid
      AND pg_catalog.age(r.xmin) > pg_catalog.age(%s::text::pg_catalog.xid)
) AND pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::int8
    < %s::int8 + %s::int8
"""
_BLOCKS = 16
_XIDS = 2**32
_COMPARABLE_XIDS = 2**30


@dataclass(slots=True)
class Covered:
    """What the publication covers of one table."""

    schema: str
    table: str
    publication: int
    """Its OID; 0 if the saved coverage is of another publication than the one that is read now."""
    operations: str
    relation_id: int
    altered: list[int] = field(default_factory=list)
    """The transaction that last set the publication's options, and a digest of the options except
    the operations."""
    named: list[int] = field(default_factory=list)
    """The transaction that last changed name, schema or owner of its row type, and its owner."""
    entries: list[int] = field(default_factory=list)
    """OIDs of the rows of pg_publication_rel and pg_publication_namespace that publish it."""
    row_filter: str | None = None
    columns: str | None = None
    toast: int = 0
    """OID of its TOAST table, which differs after ALTER TABLE has rewritten the table; 0 if it has
    none, or if PostgreSQL refuses SET UNLOGGED for the table."""
    shapes: dict[str, list[int]] = field(default_factory=dict)
    """By a digest of its columns' names and types, the latest last: digests of their numbers and
    of the transactions that changed them, and the file that holds the rows."""
    attached: dict[str, int] = field(default_factory=dict)
    """The transactions that attached the partitions that are published through a root, by OID."""
    leaves: dict[str, int] = field(default_factory=dict)
    """The files that hold the rows of the partitions below a published root, by OID."""
    changed_by: dict[str, int] = field(default_factory=dict, compare=False)
    """The transactions that last changed the partitions; not saved."""
    finished_xid: int = field(default=0, compare=False)
    """All transactions below it had ended when `leaves` was read; 0 if unknown."""
    is_gone: bool = False
    """Whether the table is no longer published."""
    schema_version: int = 0
    """The last schema version of a table that is no longer published."""

    @classmethod
    def gone(cls, schema_version: int) -> Self:
        """What is saved of a table that is no longer published."""
        return cls("", "", 0, "", 0, is_gone=True, schema_version=schema_version)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Read a saved document; TypeError or ValueError if it is not one."""
        known = {one.name for one in fields(cls)} - {"changed_by"}
        covered = cls(**{name: value for name, value in document.items() if name in known})
        covered.finished_xid = int(covered.finished_xid)
        covered.leaves = {str(leaf): int(node) for leaf, node in covered.leaves.items()}
        covered.attached = {str(part): int(xid) for part, xid in covered.attached.items()}
        covered.shapes = {
            shape: [int(numbers), int(touched), int(filenode)]
            for shape, (numbers, touched, filenode) in covered.shapes.items()
        }
        return covered

    def remember(self, before: Covered) -> None:
        """Add the column digests of an earlier read, up to a limit."""
        older = {shape: one for shape, one in before.shapes.items() if shape not in self.shapes}
        self.shapes = dict([*older.items(), *self.shapes.items()][-SHAPES:])

    @property
    def document(self) -> dict[str, Any]:
        """The coverage as it is saved in KV; empty fields are left out to save space."""
        document = asdict(self)
        del document["changed_by"]
        return {name: value for name, value in document.items() if value or name in _ALWAYS}


Coverage = dict[str, Covered]
"""By table token."""


async def read_coverage(publication: PublicationReader) -> Coverage:
    """What the publication covers now; empty if it does not exist."""
    catalog = publication.catalog
    found = await catalog.rows(_PUBLICATION, [_OPERATIONS, publication.name])
    if not found:
        return {}
    publication_id, has_all, altered_by, options, *operations = found[0]
    letters = "".join(letter for letter, is_on in zip("iudt", operations, strict=True) if is_on)
    newer = publication.server_version >= FILTERS_VERSION
    query = _TABLES.format(
        entry="s.oid" if newer else "NULL",
        filter="t.rowfilter" if newer else "NULL",
        columns="r.prattrs::text" if newer else "NULL",
        schemas=_SCHEMAS if newer else "",
    )
    coverage: Coverage = {}
    roots: list[int] = []
    tables: dict[int, Covered] = {}
    rows = await catalog.rows(query, [publication.name])
    for schema, table, relation_id, is_root, *facts in rows:
        covered = Covered(
            schema, table, publication_id, letters, relation_id, [altered_by, options], *facts
        )
        coverage[table_token(schema, table)] = covered
        tables[relation_id] = covered
        if is_root:
            roots.append(relation_id)
    for relation_id, *digests in await catalog.rows(_COLUMNS, [list(tables)]):
        tables[relation_id].shapes = {str(digests[0]): digests[1:]}
    if roots:
        for root, part, is_leaf, filenode, xid, attached_by, finished in await catalog.rows(
            _LEAVES, [roots]
        ):
            tables[root].attached[str(part)] = attached_by
            tables[root].finished_xid = finished
            if is_leaf:
                tables[root].leaves[str(part)] = filenode
                tables[root].changed_by[str(part)] = xid
    by_root = [one.relation_id for one in coverage.values() if not (has_all or one.entries)]
    if by_root:
        for leaf, part, attached_by in await catalog.rows(_ANCESTORS, [by_root]):
            tables[leaf].attached[str(part)] = attached_by
    return coverage


async def filled_partitions(
    catalog: Catalog, leaves: Collection[str], parts: Collection[str]
) -> set[str]:
    """Those of the new leaves that may have rows from before they were attached.

    `parts` are the new partitions, the ones with partitions of their own included.
    """
    found = await catalog.rows(_UNPROVEN, [list(map(int, parts)), list(map(int, leaves))])
    return {str(leaf) for leaf, is_filled in found if is_filled}


async def has_older_row(catalog: Catalog, root: int, leaf: str, finished_xid: int) -> bool:
    """Whether a partition is known to have a row of a transaction below `finished_xid`.

    Such a row proves that the partition was not truncated since, and that its rows were not
    computed anew: VACUUM FULL and CLUSTER copy rows with their xmin. False if nothing is known.
    """
    if not finished_xid:
        return False
    for relation in (int(leaf), root):
        found = await catalog.rows(_READABLE, [relation])
        if found and found[0][1]:
            # A percent sign would begin a parameter.
            table = found[0][0].replace("%", "%%")
            query = _OLDER_ROW.format(table=table, blocks=_BLOCKS)
            oldest = [int(leaf), str(finished_xid % _XIDS), finished_xid, _COMPARABLE_XIDS]
            try:
                (answer,) = await catalog.rows(query, oldest)
            except SourceError:
                return False
            return bool(answer[0])
    return False
