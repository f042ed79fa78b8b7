"""Fixtures for all tests, from the plugin modules in `tests/fixtures`.

Real servers, started on first use, one of each kind per pytest worker:

- `postgres_of(version)` (session): `bridge.embedded.PostgresServer` of that version
- `nats_server` (session): `SharedNats`, with the accounts that `bridge check --permissions` prints
  for the test's prefix: `.bridge_url`, `.reader_url`, and `.url` for an administrator
- `pg`: the PostgreSQL of this test, running even if a previous test killed it; version 18
  unless the test is decorated with `@both_versions` or `@versions_since(15)` (from
  `tests.fixtures.postgres`), or TAILRACE_POSTGRES names another
- `own_postgres(version=18, settings={…}, directory=…)`, `own_nats(config="…", jetstream={…},
  binary=…)`: factories of private servers, for tests that would disturb others
- `nats_cluster`: `NatsCluster`, three nodes of its own, for replicated streams

Created for each test:

- `database`: `Database` with `.name .dsn .server`, `.connect(**options)`, `.execute(sql, params)`
  (returns the rows), `.value(sql, params)`, `.publish(*tables, name="pub", options="")`,
  `.role(attributes="LOGIN")` (returns a DSN), `.current_lsn()`, `.slot(name)`; dropped afterwards
  with its sessions, slots and roles
- `prefix`: NATS prefix (a str); its streams, buckets and object stores are deleted afterwards
- `nats_client` (async): a nats-py client connected to `nats_server`
- `bridge_process(*flags, slot=None, pub="pub", wait=True, ready_timeout=60, database_url=None,
  nats_url=None, prefix=None, environment=None)`: factory of `BridgeProcess` with `.pid .running
  .exit_code .http_port .log_text() .http(path, method, headers, body) .status() .ready()
  .wait_ready(timeout) .wait_logged(text, timeout) .wait(timeout) -> exit code, .kill()
  .terminate() .interrupt() .freeze() .thaw()`; the slot is `slot_{database.name}` by default
- `cdc`: `CdcLog`, the CDC stream and KV buckets of this test: `await .settle()` (everything
  committed so far is stored), `.stored(subject) .of_tables() .of_table(token) .changes(token)
  .messages(prefix) .progress() .schema(token) .kept_progress(source)`
- `publisher`: `Publisher`, which puts messages of any kind into streams of this test without a
  bridge; `client`: the SDK connected to them
- `run_command(program, *arguments, environment=None, timeout=60, stdin=None)`: run `bridge`, `cdc`
  or `spark-consumer` to its end, a `subprocess.CompletedProcess` with text
- `demo(*arguments)`: factory of running `bridge demo` with `.process .port .scratch .text
  .wait_for(text) .ended() -> exit code, .leftovers()`
- `tcp_proxy(target_port)`: factory of `TcpProxy` with `.port .through(url) .start() .stop() .cut()
  .deaf(direction="both") .hear(direction="both") .delay(seconds) .throttle(bytes_per_second)
  .connections .connections_accepted .bytes_forwarded`; directions are "up" (to the server), "down"
- `mirror_process(*arguments, environment=None)`: factory of `MirrorProcess`, a running
  `cdc mirror`, with `.pid .running .log_text() .wait_logged(text) .wait() -> exit code, .kill()
  .interrupt()`
- `canary_deployment`, `canary_bridge(*flags, **options)`: servers with unique passwords, a table
  with unique values, a bridge on them; `.planted.refuse(where, text)` fails if one is in the text

Functions to import:

- `tests.fixtures.waiting`: `wait_until(condition, timeout=20, what="")`, and for asynchronous
  tests `await eventually(condition, timeout=20, what="")`; both return the first true value
- `tests.fixtures.stored`: `await stored_messages(client, stream, subject=None, start_sequence=1)`,
  `await stored_events(client, prefix, subject=None, start_sequence=1)` (row changes, unpacked)
- `tests.fixtures.oracle`: `read_table(dsn, table)`, `read_table_as_text(dsn, table)`,
  `table_difference(source_dsn, replica_dsn, table)`
"""

from __future__ import annotations

import signal

pytest_plugins = [
    "tests.fixtures.postgres",
    "tests.fixtures.nats",
    "tests.fixtures.bridge_process",
    "tests.fixtures.tcp_proxy",
    "tests.fixtures.cdc_log",
    "tests.fixtures.publisher",
    "tests.fixtures.snapshots",
    "tests.fixtures.pieces",
    "tests.fixtures.demo",
    "tests.fixtures.hypothesis_profiles",
    "tests.fixtures.mirror",
    "tests.fixtures.canaries",
]


def pytest_configure() -> None:
    """Restore SIGINT, which a shell ignores for background jobs; child processes inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
