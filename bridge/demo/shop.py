"""The database of the demonstration: six small tables that use most of the protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from consumer_sdk.wire.subjects import format_table_name, table_token

if TYPE_CHECKING:
    import psycopg

DATABASE: Final = "shop"
PUBLICATION: Final = "shop"
SLOT: Final = "shop"

# `products` has a column of nearly every family of types and a TOASTed description; `visits` has no
# key at all; `invoices` lives in a schema of its own.
TABLES: Final = (
    ("public", "customers"),
    ("public", "orders"),
    ("public", "items"),
    ("public", "products"),
    ("public", "visits"),
    ("sales", "invoices"),
)

SCHEMA: Final = """
CREATE TYPE order_status AS ENUM ('new', 'paid', 'shipped', 'returned');

CREATE TABLE customers (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text NOT NULL,
    email       text NOT NULL,
    balance     numeric(12,2) NOT NULL DEFAULT 0,
    preferences jsonb NOT NULL DEFAULT '{}',
    joined_at   timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE orders (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer_id bigint NOT NULL REFERENCES customers,
    status      order_status NOT NULL DEFAULT 'new',
    total       numeric(12,2) NOT NULL DEFAULT 0,
    placed_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    note        text
);

CREATE TABLE items (
    order_id   bigint NOT NULL REFERENCES orders,
    line       integer NOT NULL,
    product_id integer NOT NULL,
    quantity   smallint NOT NULL,
    price      numeric(10,2) NOT NULL,
    PRIMARY KEY (order_id, line)
);

CREATE TABLE products (
    id           integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    code         uuid NOT NULL DEFAULT gen_random_uuid(),
    name         text NOT NULL,
    price        numeric(10,2) NOT NULL,
    tax_rate     numeric NOT NULL,
    weight_kg    real,
    rating       double precision,
    in_stock     boolean NOT NULL,
    stock        smallint NOT NULL,
    tags         text[] NOT NULL,
    prices_seen  numeric(10,2)[],
    attributes   jsonb,
    raw_feed     json,
    thumbnail    bytea,
    first_sold   date,
    opens_at     time,
    changed_at   timestamp(6),
    available_at timestamptz,
    lead_time    interval,
    age_group    int4range,
    supplier_ip  inet,
    description  text
);

CREATE TABLE visits (
    page    text NOT NULL,
    country char(2) NOT NULL,
    seconds integer
);
ALTER TABLE visits REPLICA IDENTITY FULL;

CREATE SCHEMA sales;
CREATE TABLE sales.invoices (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    order_id  bigint NOT NULL,
    amount    numeric(12,2) NOT NULL,
    issued_on date NOT NULL DEFAULT current_date,
    due_on    date NOT NULL DEFAULT current_date + 30,
    reminders integer NOT NULL DEFAULT 0
);
CREATE INDEX ON sales.invoices (order_id);
"""

# Expressions that the set-up and the workload share; each call draws new values.
A_CUSTOMER: Final = """
    (ARRAY['Ada','Alan','Barbara','Claude','Dennis','Edsger','Frances','Grace','Ken','Leslie',
           'Linus','Margaret','Niklaus','Radia','Tim'])[1 + floor(random() * 15)::int] || ' '
 || (ARRAY['Berg','Costa','Dubois','Fischer','García','Ito','Jansen','Kowalska','Łukasik','Meyer',
           'Nguyễn','O''Brien','Popov','Rossi','Sørensen'])[1 + floor(random() * 15)::int]
"""
A_PRICE: Final = "round((1 + random() * 199)::numeric, 2)"
A_PRODUCT: Final = """
    (ARRAY['Lamp','Chair','Kettle','Bicycle','Radio','Tent','Notebook','Umbrella','Violin','Clock'])
        [1 + floor(random() * 10)::int] || ' No. ' || floor(random() * 900 + 100)
"""
# Incompressible and beyond 2 KB, so that PostgreSQL moves it out of line.
A_DESCRIPTION: Final = """
    (SELECT string_agg(md5(random()::text), ' ') FROM generate_series(1, 90 + mod(n, 30)))
"""


def new_products(count: int) -> str:
    """INSERT of products with different values."""
    return f"""
INSERT INTO products (name, price, tax_rate, weight_kg, rating, in_stock, stock, tags, prices_seen,
    attributes, raw_feed, thumbnail, first_sold, opens_at, changed_at, available_at, lead_time,
    age_group, supplier_ip, description)
SELECT {A_PRODUCT}, {A_PRICE}, 0.19 + random()::numeric / 100, (random() * 30)::real,
    random() * 5, random() < 0.9, floor(random() * 500)::smallint,
    ARRAY['new', 'a "quoted" tag', 'größe ' || n], ARRAY[{A_PRICE}, NULL, {A_PRICE}],
    jsonb_build_object('colour', (ARRAY['red','green','blue'])[1 + mod(n, 3)],
                       'size', jsonb_build_array(mod(n, 7), 1.5, null), 'fragile', mod(n, 2) = 0),
    '{{"b": 1, "a":  [1, 2]}}', decode(md5(random()::text), 'hex'),
    current_date - (random() * 3650)::int, time '06:00' + random() * interval '6 hours',
    clock_timestamp()::timestamp, clock_timestamp() + random() * interval '90 days',
    random() * interval '40 days', int4range(mod(n, 12), 12 + mod(n, 80)),
    ('10.0.' || mod(n, 256) || '.' || floor(random() * 256))::inet, {A_DESCRIPTION}
FROM generate_series(1, {count}) n
"""


def new_visits(count: int) -> str:
    """INSERT of visits, some of them equal."""
    return f"""
INSERT INTO visits (page, country, seconds)
SELECT '/' || (ARRAY['','cart','help','sale','login'])[1 + floor(random() * 5)::int],
       (ARRAY['DE','FR','JP','BR','PL','VN'])[1 + floor(random() * 6)::int],
       nullif(floor(random() * 40)::int, 0)
FROM generate_series(1, {count})
"""


_SEED: Final = (
    f"""INSERT INTO customers (name, email, balance)
        SELECT {A_CUSTOMER}, 'customer' || n || '@example.com', {A_PRICE}
        FROM generate_series(1, 400) n""",
    f"""INSERT INTO orders (customer_id, status, total)
        SELECT 1 + floor(random() * 400)::int,
               (ARRAY['new','paid','shipped'])[1 + mod(n, 3)]::order_status, {A_PRICE}
        FROM generate_series(1, 1000) n""",
    f"""INSERT INTO items (order_id, line, product_id, quantity, price)
        SELECT id, line, 1 + floor(random() * 120)::int, 1 + mod(line, 4), {A_PRICE}
        FROM orders, generate_series(1, 1 + mod(id, 4)::int) line""",
    """INSERT INTO sales.invoices (order_id, amount)
       SELECT id, total FROM orders WHERE status <> 'new'""",
    new_products(120),
    new_visits(300),
)


def set_up(connection: psycopg.Connection) -> int:
    """Create the tables with their first rows, and the publication; return the row count."""
    with connection.transaction():
        connection.execute(SCHEMA)
        rows = sum(connection.execute(statement.encode()).rowcount for statement in _SEED)
        connection.execute(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")
    return rows


def tokens() -> list[str]:
    """The tables as subjects spell them."""
    return [table_token(schema, table) for schema, table in TABLES]


def names() -> list[str]:
    """The tables as SQL spells them."""
    return [format_table_name(schema, table) for schema, table in TABLES]
