"""`bridge demo` from outside: what it says, how it ends, what it leaves."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess

import pytest

from bridge.embedded import LOOPBACK
from tests.fixtures.bridge_process import clean_environment
from tests.fixtures.demo import BRIDGE
from tests.fixtures.waiting import wait_until

# Five programs start in each of them: seconds on a quiet machine, minutes on a crowded one.
pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_the_demo_ends_with_a_checked_result_and_leaves_nothing_behind(demo):
    running = demo("--seconds", "4", "--no-spark")
    assert running.ended() == 0, running.text
    counts = re.search(r"([\d,]+) changes committed = ([\d,]+) events stored", running.text)
    assert counts is not None, running.text
    assert counts[1] == counts[2] != "0"
    assert "cdc verify: the mirror equals the source, row by row" in running.text
    assert "Everything agrees." in running.text
    assert f"http://127.0.0.1:{running.port}/" in running.text
    assert "\x1b" not in running.text
    assert "postgresql://" not in running.text
    assert running.leftovers() == []


@pytest.mark.slow
def test_ctrl_c_closes_the_shop_and_the_second_ends_everything(demo):
    running = demo("--seconds", "600", "--no-spark")
    running.wait_for("events stored")
    running.process.send_signal(signal.SIGINT)
    running.wait_for("the shop is closed")
    running.process.send_signal(signal.SIGINT)
    assert running.ended() == 128 + signal.SIGINT
    assert "interrupted: stopping everything and removing it" in running.text
    assert running.leftovers() == []


def test_a_killed_demo_leaves_no_process_and_no_directory(demo):
    running = demo("--seconds", "600", "--no-spark")
    running.wait_for("events stored")
    assert running.leftovers()
    running.process.kill()
    running.process.wait()
    wait_until(lambda: not running.leftovers(), 30, lambda: str(running.leftovers()))


def test_an_early_ctrl_c_leaves_nothing_behind(demo):
    running = demo("--seconds", "600", "--no-spark")
    running.wait_for("JetStream on port")
    running.process.send_signal(signal.SIGINT)
    assert running.ended() == 128 + signal.SIGINT
    assert running.leftovers() == []


def test_a_taken_port_is_replaced_and_said_so(demo):
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        taken = other.getsockname()[1]
        running = demo("--seconds", "600", "--no-spark", "--port", str(taken))
        running.wait_for("is taken; using")
        wait_until(lambda: re.search(r"is taken; using \d+\s", running.text))
        found = re.search(rf"port {taken} is taken; using (\d+)", running.text)
        assert found is not None
        # The one it was not told to use is anybody's.
        running.port = int(found[1])
        running.process.send_signal(signal.SIGTERM)
        assert running.ended() == 128 + signal.SIGTERM
    assert running.leftovers() == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seconds", "abc"], "argument --seconds: invalid float value: 'abc'"),
        (["--seconds", "0"], "--seconds: 0 is not a time to run for"),
        (["--seconds", "nan"], "--seconds: nan is not a time to run for"),
        (["--port", "70000"], "--port: 70000 is not a port"),
        (["--for-ever"], "unrecognized arguments: --for-ever"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(run_command, arguments, said):
    ended = run_command("bridge", "demo", *arguments)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_a_closed_pipe_ends_the_demo(demo):
    scratch = demo("--seconds", "0").scratch
    process = subprocess.run(
        f"{BRIDGE} demo --no-spark --port 0 --seconds 600 | head -3; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable=shutil.which("bash"),
        env=clean_environment(TMPDIR=str(scratch)),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.stdout.splitlines()[-1] == "1"
    assert "Traceback" not in process.stderr
    assert list(scratch.iterdir()) == []
