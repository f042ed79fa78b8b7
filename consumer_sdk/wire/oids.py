"""Object identifiers of PostgreSQL's built-in types: fixed numbers, the same in every database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

BOOL: Final = 16
BYTEA: Final = 17
CHAR: Final = 18
NAME: Final = 19
INT8: Final = 20
INT2: Final = 21
INT2VECTOR: Final = 22
INT4: Final = 23
REGPROC: Final = 24
TEXT: Final = 25
OID: Final = 26
TID: Final = 27
XID: Final = 28
CID: Final = 29
OIDVECTOR: Final = 30
JSON: Final = 114
XML: Final = 142
POINT: Final = 600
LSEG: Final = 601
PATH: Final = 602
BOX: Final = 603
POLYGON: Final = 604
LINE: Final = 628
CIDR: Final = 650
FLOAT4: Final = 700
FLOAT8: Final = 701
CIRCLE: Final = 718
MACADDR8: Final = 774
MONEY: Final = 790
MACADDR: Final = 829
INET: Final = 869
BPCHAR: Final = 1042
VARCHAR: Final = 1043
DATE: Final = 1082
TIME: Final = 1083
TIMESTAMP: Final = 1114
TIMESTAMPTZ: Final = 1184
INTERVAL: Final = 1186
TIMETZ: Final = 1266
BIT: Final = 1560
VARBIT: Final = 1562
NUMERIC: Final = 1700
UUID: Final = 2950
PG_LSN: Final = 3220
TSVECTOR: Final = 3614
TSQUERY: Final = 3615
JSONB: Final = 3802
INT4RANGE: Final = 3904
NUMRANGE: Final = 3906
TSRANGE: Final = 3908
TSTZRANGE: Final = 3910
DATERANGE: Final = 3912
INT8RANGE: Final = 3926
JSONPATH: Final = 4072
XID8: Final = 5069

ARRAY_ELEMENTS: Final[Mapping[int, int]] = {
    143: XML,
    199: JSON,
    629: LINE,
    651: CIDR,
    719: CIRCLE,
    775: MACADDR8,
    791: MONEY,
    1000: BOOL,
    1001: BYTEA,
    1002: CHAR,
    1003: NAME,
    1005: INT2,
    1006: INT2VECTOR,
    1007: INT4,
    1008: REGPROC,
    1009: TEXT,
    1010: TID,
    1011: XID,
    1012: CID,
    1013: OIDVECTOR,
    1014: BPCHAR,
    1015: VARCHAR,
    1016: INT8,
    1017: POINT,
    1018: LSEG,
    1019: PATH,
    1020: BOX,
    1021: FLOAT4,
    1022: FLOAT8,
    1027: POLYGON,
    1028: OID,
    1040: MACADDR,
    1041: INET,
    1115: TIMESTAMP,
    1182: DATE,
    1183: TIME,
    1185: TIMESTAMPTZ,
    1187: INTERVAL,
    1231: NUMERIC,
    1270: TIMETZ,
    1561: BIT,
    1563: VARBIT,
    2951: UUID,
    3221: PG_LSN,
    3643: TSVECTOR,
    3645: TSQUERY,
    3807: JSONB,
    3905: INT4RANGE,
    3907: NUMRANGE,
    3909: TSRANGE,
    3911: TSTZRANGE,
    3913: DATERANGE,
    3927: INT8RANGE,
    4073: JSONPATH,
    271: XID8,
}
"""Built-in array type -> its element type."""
