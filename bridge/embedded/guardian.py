"""Runs one server and ends it when the process that asked for it ends.

`guarded_process` starts this file as a script; it uses only the standard library. Its standard
input is a pipe whose other end only the owner holds. The first line describes the server (command
line arguments are visible to every user). When the owner ends in any way, even by SIGKILL, the pipe
closes and the server is stopped. This works on Linux and macOS.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

OWNER_CHECK_SECONDS = 1.0

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Start the command described by the first line of input; return its exit code."""
    job = json.loads(sys.stdin.buffer.readline())
    owner = os.getppid()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    stop_requested = False

    def request_stop(_signum: int, _frame: object) -> None:
        nonlocal stop_requested
        stop_requested = True

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, request_stop)
    signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)

    pid = start(job)
    os.write(sys.stdout.fileno(), b"%d\n" % pid)
    while True:
        readable, _, _ = select.select([sys.stdin, wake_read], [], [], OWNER_CHECK_SECONDS)
        if wake_read in readable:
            os.read(wake_read, 4096)
        code = exit_code(pid)
        if code is not None:
            reap_orphans()
            return code
        # A forked child of the owner may keep the pipe open, so the parent is checked as well.
        if stop_requested or sys.stdin in readable or os.getppid() != owner:
            code = stop(pid, job["stop_signal"], job["grace"])
            reap_orphans()
            if job["remove"] is not None:
                remove(job["remove"])
            return code


def start(job: dict[str, object]) -> int:
    """Fork and execute the server, as the given account and in a session of its own."""
    guardian = os.getpid()
    # Loaded before the switch of accounts, since the new one may not read Python's library.
    prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None
    if prctl is not None:
        # Children that a killed server leaves behind become children of the guardian.
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.chdir("/")
        os.umask(0o077)
        if job["uid"] is not None:
            os.setgroups([])
            os.setgid(int(str(job["gid"])))
            os.setuid(int(str(job["uid"])))
        if prctl is not None:
            # If the guardian is killed, the kernel signals the server.
            prctl(PR_SET_PDEATHSIG, int(str(job["stop_signal"])), 0, 0, 0)
            if os.getppid() != guardian:
                os._exit(1)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        command = [str(part) for part in job["command"]]  # type: ignore[attr-defined]
        os.execve(command[0], command, dict(job["environment"]))  # type: ignore[call-overload]  # noqa: S606
    except BaseException as error:  # noqa: BLE001  # a forked child must never return into main()
        os.write(2, f"cannot start: {error}\n".encode())
    os._exit(127)


def exit_code(pid: int) -> int | None:
    """Reap the server if it has ended."""
    try:
        reaped, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 1
    if reaped == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def stop(pid: int, signum: int, grace: float) -> int:
    """Ask the server to end, and kill it with all its children after the grace period."""
    signal_process(pid, signal.SIGCONT)
    signal_process(pid, signum)
    deadline = time.monotonic() + grace
    while (code := exit_code(pid)) is None:
        if time.monotonic() > deadline:
            kill_tree(pid)
        time.sleep(0.01)
    return code


def kill_tree(pid: int) -> list[int]:
    """SIGKILL a server and its children; return their process ids.

    The server is frozen first, so that it cannot start further children while they are counted.
    """
    signal_process(pid, signal.SIGSTOP)
    tree = [pid, *children(pid)]
    for member in tree:
        signal_process(member, signal.SIGKILL)
    return tree


def reap_orphans() -> None:
    """Kill and reap the processes that an ended server has left behind."""
    for pid in children(os.getpid()):
        signal_process(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def signal_process(pid: int, signum: int) -> None:
    """Signal a process that may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def children(pid: int) -> list[int]:
    """Direct children of a process; PostgreSQL has no others."""
    if Path("/proc/self/stat").exists():
        entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [int(entry.name) for entry in entries if _linux_parent(entry) == pid]
    import subprocess

    command = ["ps", "-axo", "pid=,ppid="]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pairs = [line.split() for line in listing.splitlines()]
    return [int(child) for child, parent in pairs if int(parent) == pid]


def _linux_parent(entry: Path) -> int | None:
    # The command name, field 2, is in parentheses and may itself contain spaces and parentheses.
    try:
        fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[1])


def remove(directory: str) -> None:
    """Delete a temporary directory whose owner has ended."""
    import shutil

    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
