"""What `cdc` says to arguments and servers it cannot work with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from consumer_sdk.commands.cli import run
from consumer_sdk.commands.options import seconds
from consumer_sdk.transport.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bridge.embedded import NatsServer

COMMANDS = ("schema", "tables", "tail", "snapshot", "mirror", "verify")


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `cdc` in this process, which must refuse: `refused(exit code, arguments…)`."""

    def refuse(code: int, *arguments: str) -> str:
        assert run(arguments) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("cdc: ")
        assert len(err.splitlines()) == 1
        return err

    return refuse


@pytest.mark.parametrize("command", [(), *((command,) for command in COMMANDS)])
def test_every_command_tells_its_version(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run([*command, "--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"cdc {__version__}\n"


def test_an_unknown_command_is_answered_with_all_there_are(refused: Callable[..., str]) -> None:
    said = refused(2, "frob")
    for command in COMMANDS:
        assert f"'{command}'" in said


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("mirror", "--all", "orders", "--into", "sqlite:///x.db"), "not both"),
        (("mirror", "--into", "sqlite:///x.db"), "name the tables to mirror, or give --all"),
        (("verify", "t", "--source", "mysql://x", "--replica", "sqlite:///x"), "--source is not"),
        (("verify", "t", "--source", "", "--replica", "sqlite:///x"), "--source is not"),
        (("verify", "t", "--source", "host=h pw=geheim", "--replica", "sqlite:///x"), "--source"),
        (("verify", "t", "--source", "host=h", "--replica", "mysql://x"), "expected sqlite:///"),
        (("snapshot", "t", "--columns", ""), "--columns holds an empty name"),
        (("snapshot", "t", "--columns", "id,,name"), "--columns holds an empty name"),
        (("snapshot", "t", "--columns", "id,name,id"), "--columns names id twice"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_asked(
    arguments: tuple[str, ...],
    text: str,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nobody is there: a connection would be an exit code of 3.
    monkeypatch.setenv("NATS_URL", "nats://127.0.0.1:1")
    said = refused(2, *arguments)
    assert text in said
    assert "; " in said
    assert "geheim" not in said


def test_credentials_without_a_key_are_refused_also_where_nobody_asks_for_them(
    refused: Callable[..., str],
    nats_server: NatsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "junk.creds").write_text("junk")
    monkeypatch.setenv("NATS_URL", nats_server.reader_url)
    monkeypatch.setenv("NATS_CREDS", str(tmp_path / "junk.creds"))
    assert "does not hold a NATS key" in refused(2, "tables")


@pytest.mark.parametrize("command", [("tables",), ("schema", "t"), ("tail",), ("tail", "t")])
def test_a_server_without_jetstream_is_told_at_once(
    command: tuple[str, ...],
    refused: Callable[..., str],
    own_nats: Callable[..., NatsServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NATS_URL", own_nats(jetstream=None).url)
    began = time.monotonic()
    assert "JetStream is not enabled on this NATS" in refused(3, *command)
    assert time.monotonic() - began < 4


@pytest.mark.parametrize(
    ("text", "expected"), [("2.5", 2.5), ("500ms", 0.5), ("10s", 10.0), ("2m", 120.0), ("1h", 3600)]
)
def test_times_are_written_as_for_the_bridge(text: str, expected: float) -> None:
    assert seconds(text) == expected
