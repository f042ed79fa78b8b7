"""`make check` fails on a known vulnerability, and says so where no advisory source answers."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from bridge.embedded import free_port
from tests.dependencies import LOCKS, OSV, audit, read_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

GIVES_UP_WITHIN_SECONDS = 10
PATIENT = 60.0
"""For a source that does answer, on a machine that is busy."""


@contextmanager
def advisory_source(answer: Callable[[str], Any]) -> Iterator[str]:
    """A server that answers as https://google.github.io/osv.dev/post-v1-query/ describes."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = answer(query["package"]["name"])
            body = json.dumps(found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_known_vulnerability_of_a_locked_package_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: set[str] = set()

    def answer(name: str) -> Any:
        asked.add(name)
        if name != "pyarrow":
            return {}
        fixed = {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.1"}]}
        package = {"name": name, "ecosystem": "PyPI"}
        return {"vulns": [{"id": "X-1", "affected": [{"package": package, "ranges": [fixed]}]}]}

    with advisory_source(answer) as url:
        assert audit(((*OSV, "--osv-url", url),), PATIENT) == 1
    printed = capsys.readouterr()
    assert "pyarrow" in printed.err
    assert "X-1, repaired in 99.1" in printed.err
    assert "1 with known vulnerabilities" in printed.out
    unmarked = [e.name for lock in LOCKS.values() for e in read_lock(lock)
                if e.requirement.marker is None]  # fmt: skip
    assert set(unmarked) <= asked


def test_packages_without_known_vulnerability_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with advisory_source(lambda _name: {}) as url:
        assert audit(((*OSV, "--osv-url", url),), PATIENT) == 0
    assert ", 0 with known vulnerabilities" in capsys.readouterr().out


def test_a_source_that_cannot_be_reached_is_named_and_does_not_fail(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert audit(((*OSV, "--osv-url", f"http://127.0.0.1:{free_port()}/"),), PATIENT) == 0
    assert "NOT done: no advisory source can be reached (osv: " in capsys.readouterr().out
    with advisory_source(lambda _name: None) as url:
        assert audit(((*OSV, "--osv-url", url),), PATIENT) == 0
    assert "NOT done" in capsys.readouterr().out


def test_the_audit_gives_up_soon_if_no_source_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        service = (*OSV, "--osv-url", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        begin = time.monotonic()
        assert audit((service, service)) == 0
        assert time.monotonic() - begin < GIVES_UP_WITHIN_SECONDS
    assert "NOT done" in capsys.readouterr().out
