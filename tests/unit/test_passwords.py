"""Passwords from files and commands, without a server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from consumer_sdk.errors import UsageError
from consumer_sdk.transport import passwords
from consumer_sdk.transport.passwords import PasswordSource, PasswordUnavailable
from consumer_sdk.transport.settings import NatsSettings

if TYPE_CHECKING:
    from pathlib import Path


def counting_command(tmp_path: Path) -> tuple[tuple[str, ...], Path]:
    """A command that prints p1, p2 and so on, and the file with the number of its runs."""
    runs = tmp_path / "runs"
    runs.write_text("0")
    program = tmp_path / "print_password.py"
    program.write_text(
        "import sys; from pathlib import Path\n"
        "runs = Path(sys.argv[1]); n = int(runs.read_text()) + 1; runs.write_text(str(n))\n"
        "print(f'p{n}')\n"
    )
    return (sys.executable, str(program), str(runs)), runs


def test_a_file_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "password"
    source = PasswordSource(file=str(path))
    path.write_text("one \n")
    assert source.read() == "one "
    path.write_text("two")
    assert source.read() == "two"
    assert source.changes
    assert not PasswordSource("fixed").changes
    assert PasswordSource("fixed").read() == "fixed"
    assert "fixed" not in repr(PasswordSource("fixed"))


def test_a_command_runs_once_until_its_output_is_refused_or_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, runs = counting_command(tmp_path)
    source = PasswordSource(command=command)
    assert [source.read(), PasswordSource(command=command).read()] == ["p1", "p1"]
    assert runs.read_text() == "1"
    source.refuse("p0")
    assert source.read() == "p1"
    source.refuse("p1")
    assert source.read() == "p2"
    monkeypatch.setattr(passwords, "KEPT_SECONDS", -1.0)
    assert source.read() == "p3"


def test_no_shell_sees_the_command(tmp_path: Path) -> None:
    settings = NatsSettings.resolve(
        environment={
            "NATS_PASSWORD_COMMAND": f"{sys.executable} -c 'import sys; print(sys.argv[1:])' "
            f"'$HOME' ';' touch {tmp_path / 'planted'} '`id`'"
        }
    )
    source = settings.password_source
    assert source.read() == str(["$HOME", ";", "touch", str(tmp_path / "planted"), "`id`"])
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('s3cret')", "ended with status 1"),
        ("", "is empty"),
        ("print('s3cret\\nsecond')", "is not one line"),
        ("print('x' * 70000)", "is not one line"),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", "UTF-8"),
        ("import time; time.sleep(60)", "did not end within 0.5 s"),
    ],
)
def test_a_command_without_a_password_is_one_line_without_its_output(
    code: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in code:
        monkeypatch.setattr(passwords, "COMMAND_SECONDS", 0.5)
    with pytest.raises(PasswordUnavailable, match=said) as caught:
        PasswordSource(command=(sys.executable, "-c", code)).read()
    assert "s3cret" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_command_or_file_is_named() -> None:
    with pytest.raises(PasswordUnavailable, match="/no/such/program cannot be started: No such"):
        PasswordSource(command=("/no/such/program",)).read()
    with pytest.raises(PasswordUnavailable, match="file /no/such/file cannot be read: No such"):
        PasswordSource(file="/no/such/file").read()


def test_the_sdk_takes_one_source_of_a_password(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("geheim")
    environment = {"NATS_PASSWORD_FILE": str(path), "NATS_BRIDGE_PASSWORD": "geheim"}
    with pytest.raises(UsageError, match="NATS_BRIDGE_PASSWORD and NATS_PASSWORD_FILE are both"):
        NatsSettings.resolve(environment=environment)
    with pytest.raises(UsageError, match="no such file"):
        NatsSettings.resolve(environment={"NATS_PASSWORD_FILE": "/no/such/file"})
    with pytest.raises(UsageError, match="NATS_PASSWORD_COMMAND is not a command"):
        NatsSettings.resolve(environment={"NATS_PASSWORD_COMMAND": "a 'b"})
    with pytest.raises(UsageError, match="NATS_TLS_FIRST: 'maybe' is not yes or no"):
        NatsSettings.resolve(environment={"NATS_TLS_FIRST": "maybe"})
    settings = NatsSettings.resolve("nats://me@h", environment={"NATS_PASSWORD_FILE": str(path)})
    options = settings.for_nats()
    assert (options["user"], "geheim" in repr(options)) == ("me", False)
