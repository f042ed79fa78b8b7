"""What `cdc` says to arguments and servers it cannot work with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from consumer_sdk.cli import run
from consumer_sdk.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

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
