"""The unprivileged account that runs PostgreSQL, which refuses to run as root."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bridge.embedded.guarded_process import ServerError

PLAIN_ENVIRONMENT: Final = {"LC_ALL": "C", "PATH": os.defpath, "TZ": "UTC"}
CANDIDATES: Final = ("nobody", "daemon", "postgres")


@dataclass(frozen=True)
class Account:
    """The account that a server runs as."""

    name: str
    uid: int
    gid: int

    def can_enter(self, directory: Path) -> bool:
        """Whether the account may enter a directory; tried as that account."""
        return self._succeeds("/bin/sh", "-c", 'cd "$1"', "sh", str(directory))

    def can_run(self, program: Path) -> bool:
        """Whether the account may execute a program; tried with --version."""
        return self._succeeds(str(program), "--version")

    def _succeeds(self, *command: str) -> bool:
        try:
            attempt = subprocess.run(
                command,
                user=self.uid,
                group=self.gid,
                extra_groups=[],
                cwd="/",
                env=PLAIN_ENVIRONMENT,
                capture_output=True,
                check=False,
            )
        except PermissionError:
            return False
        return attempt.returncode == 0

    def own(self, path: Path) -> None:
        """Give one file or directory to the account."""
        os.chown(path, self.uid, self.gid, follow_symlinks=False)


def account_for(directory: Path | None) -> Account | None:
    """The account to switch to, or None if this process is already unprivileged.

    A directory that belongs to an ordinary user keeps that owner.
    """
    if os.geteuid() != 0:
        return None
    if directory is not None and directory.exists() and (owner := directory.stat().st_uid) != 0:
        try:
            entry = pwd.getpwuid(owner)
        except KeyError:
            raise ServerError(
                f"{directory} belongs to user id {owner}, which has no account; choose another one"
            ) from None
        return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
    for name in CANDIDATES:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
    raise ServerError(
        "PostgreSQL does not run as root and there is none of the accounts"
        f" {', '.join(CANDIDATES)}; run as an ordinary user"
    )


def temporary_directory(account: Account | None) -> Path:
    """A new temporary directory that the account can enter.

    It belongs to this process, so that the account can plant nothing where this process writes.
    """
    if account is None:
        return Path(tempfile.mkdtemp(prefix="tailrace-"))
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp")):  # noqa: S108
        if account.can_enter(Path(parent)):
            directory = Path(tempfile.mkdtemp(prefix="tailrace-", dir=parent))
            directory.chmod(0o711)
            return directory
    raise ServerError(f"user {account.name} can enter no temporary directory; set TMPDIR")


def reachable_tree(tree: Path, account: Account | None, fallback: Path) -> Path:
    """The PostgreSQL tree itself if the account can use it, else a copy below `fallback`.

    Other accounts cannot enter a virtual environment below a home directory such as /root.
    """
    if account is None or account.can_run(tree / "bin" / "postgres"):
        return tree
    copies = fallback / "binaries"
    shutil.rmtree(copies, ignore_errors=True)
    package = tree.parent
    # The wheel's programs find their shared libraries by a path relative to themselves:
    # beside the package on Linux, inside it on macOS.
    for part in (tree, package / ".dylibs", package.with_name(f"{package.name}.libs")):
        if part.is_dir():
            shutil.copytree(
                part,
                copies / part.relative_to(package.parent),
                ignore=shutil.ignore_patterns("include", "*.a"),
            )
    for path in (copies, *copies.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | (0o055 if mode & 0o100 else 0o044))
    copy = copies / tree.relative_to(package.parent)
    if not account.can_run(copy / "bin" / "postgres"):
        raise ServerError(
            f"user {account.name} can run PostgreSQL neither from {tree} nor from {copy}"
        )
    return copy
