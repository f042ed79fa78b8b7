"""Replicas, exports and lakes: for their owner alone, and never through somebody else's link."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bridge.embedded import GuardedProcess, NatsServer, PostgresServer, ServerError
from bridge.embedded.account import account_for, temporary_directory
from consumer_sdk.commands.files import open_row_file
from consumer_sdk.errors import TargetError
from consumer_sdk.snapshot.chunks import ChunkRows
from consumer_sdk.targets.sqlite import SqliteTarget
from consumer_sdk.transport.private_files import (
    create_private,
    open_private,
    require_own,
    resolve_own,
    umask_for,
    write_private,
)
from consumer_sdk.wire.column_types import Column
from spark_consumer.errors import SetupError
from spark_consumer.lake.directory import keep_private, lake_lock, require_usable_directory
from spark_consumer.lake.records import Manifest, ManifestEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COLUMN = Column("id", 1, "integer", 23, -1, False, None, True, 23, 0)


@pytest.fixture(params=[0o000, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever the umask lets others do."""
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Gives a file or link to another user: root really does, others become somebody else."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.lchown(path, 65534, 65534)
        else:
            owner = path.lstat().st_uid
            monkeypatch.setattr(os, "geteuid", lambda: owner + 1)

    return give


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory like /tmp."""
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o1777)
    return directory


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def mirror_once(path: Path) -> dict[str, int]:
    """Write state to a replica; returns the modes of its files while it is open."""
    target = SqliteTarget(path)
    target.open()
    try:
        target.begin()
        target.commit()
        target.begin()
        target.commit()
        return {one.name: mode(one) for one in path.resolve().parent.glob("replica*")}
    finally:
        target.close()


@pytest.mark.usefixtures("umask")
def test_the_files_of_a_replica_are_for_their_owner_alone(tmp_path: Path) -> None:
    found = mirror_once(tmp_path / "replica.db")
    assert set(found) >= {"replica.db", "replica.db-wal", "replica.db-shm"}
    assert set(found.values()) == {0o600}, found


@pytest.mark.usefixtures("umask")
def test_a_replica_keeps_the_mode_that_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "replica.db"
    mirror_once(path)
    path.chmod(0o640)
    found = mirror_once(path)
    assert found["replica.db"] == found["replica.db-wal"] == 0o640


def test_a_replica_named_by_a_link_of_ours_is_the_file_and_its_lock(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "replica.db").symlink_to(real / "replica.db")
    mirror_once(tmp_path / "link" / "replica.db")
    assert not (real / "replica.db").is_symlink()
    first = SqliteTarget(tmp_path / "replica.db")
    first.open()
    try:
        with pytest.raises(TargetError, match="another mirror is writing to it"):
            SqliteTarget(real / "replica.db").open()
    finally:
        first.close()
    assert (tmp_path / "replica.db").is_symlink()


def test_a_replica_is_not_written_through_the_link_of_another_user(
    shared: Path, tmp_path: Path, foreign: Callable[[Path], None]
) -> None:
    victim = tmp_path / "victim.db"
    (shared / "replica.db").symlink_to(victim)
    foreign(shared / "replica.db")
    with pytest.raises(TargetError, match="is a link that belongs to another user") as refused:
        SqliteTarget(shared / "replica.db").open()
    assert "\n" not in str(refused.value)
    assert not victim.exists()


@pytest.mark.parametrize("ending", ["-wal", "-shm", "-journal", ".mirror-lock"])
def test_a_link_beside_a_replica_is_not_followed(shared: Path, tmp_path: Path, ending: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (shared / f"replica.db{ending}").symlink_to(victim)
    with pytest.raises(TargetError, match="is a link"):
        mirror_once(shared / "replica.db")
    assert victim.read_text() == "untouched"


def test_a_file_that_another_user_put_into_a_shared_directory_is_not_written(
    shared: Path, foreign: Callable[[Path], None]
) -> None:
    planted = shared / "replica.db"
    planted.touch(mode=0o666)
    foreign(planted)
    with pytest.raises(TargetError, match="belongs to another user"):
        SqliteTarget(planted).open()
    assert planted.read_bytes() == b""


ENDINGS = ("jsonl", "csv", "parquet")


def export(path: Path) -> None:
    writer = open_row_file(str(path))
    try:
        writer.begin([COLUMN])
        writer.write(ChunkRows([{"id": 1}], 0))
        writer.finish()
    finally:
        writer.abandon()


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("ending", ENDINGS)
def test_an_export_is_for_its_owner_alone_unless_it_was_open_before(
    tmp_path: Path, ending: str
) -> None:
    path = tmp_path / f"out.{ending}"
    export(path)
    assert mode(path) == 0o600
    path.chmod(0o644)
    export(path)
    assert mode(path) == 0o644
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_export_does_not_write_through_a_link_in_place_of_its_temporary_file(
    shared: Path, tmp_path: Path, ending: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    path = shared / f"out.{ending}"
    (shared / f".{path.name}.part").symlink_to(victim)
    export(path)
    assert victim.read_text() == "untouched"
    assert path.is_file()
    assert not path.is_symlink()


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_export_follows_our_links_and_no_others(
    shared: Path, tmp_path: Path, foreign: Callable[[Path], None], ending: str
) -> None:
    path = shared / f"out.{ending}"
    path.symlink_to(tmp_path / f"kept.{ending}")
    export(path)
    assert path.is_symlink()
    assert (tmp_path / f"kept.{ending}").stat().st_size
    before = (tmp_path / f"kept.{ending}").read_bytes()
    foreign(path)
    with pytest.raises(TargetError, match="is a link that belongs to another user"):
        open_row_file(str(path))
    assert (tmp_path / f"kept.{ending}").read_bytes() == before


@pytest.mark.usefixtures("umask")
def test_what_is_written_to_a_new_lake_is_for_its_owner_alone(tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    require_usable_directory(lake)
    keep_private(lake)
    with lake_lock(lake):
        Manifest(lake).append(ManifestEntry(1, {}, {}))
    found = {str(one.relative_to(lake)): mode(one) for one in Path(lake).rglob("*")}
    assert found.pop("_tailrace") == found.pop("_tailrace/manifest") == mode(Path(lake)) == 0o700
    assert set(found.values()) == {0o600}


@pytest.mark.parametrize(
    ("directory_mode", "umask"),
    [(0o700, 0o077), (0o750, 0o027), (0o755, 0o022), (0o777, 0o022), (0o1777, 0o022)],
)
def test_a_lake_is_as_open_as_its_directory_but_only_its_owner_writes(
    tmp_path: Path, directory_mode: int, umask: int
) -> None:
    tmp_path.chmod(directory_mode)
    assert umask_for(tmp_path) == umask
    tmp_path.chmod(0o700)
    assert umask_for(tmp_path / "new") == 0o077


def test_a_lake_is_not_written_through_the_link_of_another_user(
    shared: Path, tmp_path: Path, foreign: Callable[[Path], None]
) -> None:
    (shared / "lake").symlink_to(tmp_path)
    require_usable_directory(str(shared / "lake"))
    (shared / "_tailrace").symlink_to(tmp_path)
    with pytest.raises(SetupError, match="is a link"), lake_lock(str(shared)):
        pass
    foreign(shared / "lake")
    with pytest.raises(SetupError, match="is a link that belongs to another user"):
        require_usable_directory(str(shared / "lake"))
    assert {one.name for one in tmp_path.iterdir()} == {"shared"}


def test_links_in_a_path_are_resolved_as_the_system_does(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "up").symlink_to("a/b")
    (tmp_path / "a" / "b" / "back").symlink_to("../..")
    for text in ("up/x", "up/../y", "a/b/back/z", "up/back/up/../q", "missing/../r", "."):
        assert resolve_own(tmp_path / text) == (tmp_path / text).resolve(), text
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        resolve_own(tmp_path / "loop")


def test_private_files_are_not_opened_through_other_names(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    link, second = tmp_path / "link", tmp_path / "second"
    link.symlink_to(victim)
    os.link(victim, second)
    attempts: list[Callable[[], Any]] = [
        lambda: open_private(link),
        lambda: create_private(link),
        lambda: create_private(victim),
        lambda: write_private(link, "x"),
        lambda: write_private(second, "x"),
        lambda: require_own(link),
    ]
    for attempt in attempts:
        with pytest.raises((PermissionError, FileExistsError)):
            attempt()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PermissionError, match="is not a file"):
        write_private(tmp_path / "pipe", "x")
    assert victim.read_text() == "untouched"


def test_the_demo_keeps_its_own_directory_when_it_gives_the_data_to_an_account() -> None:
    account = account_for(None)
    directory = temporary_directory(account)
    try:
        assert directory.stat().st_uid == os.geteuid()
        assert mode(directory) == (0o700 if account is None else 0o711)
    finally:
        directory.rmdir()


def plant(directory: Path, name: str, victim: Path) -> None:
    """Plant a link, as the account that owns the directory can."""
    directory.mkdir(parents=True, exist_ok=True)
    victim.write_text("untouched")
    (directory / name).symlink_to(victim)
    if os.geteuid() == 0:
        os.lchown(directory / name, 65534, 65534)
        os.chown(directory, 65534, 65534)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every account can enter, which those of pytest are not."""
    with tempfile.TemporaryDirectory(prefix="tailrace-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("name", ["password", "postgres.log", "data/embedded.conf"])
def test_an_embedded_postgresql_writes_through_no_link(open_directory: Path, name: str) -> None:
    directory, victim = open_directory / "server", open_directory / "victim"
    plant((directory / name).parent, Path(name).name, victim)
    directory.chmod(0o755)
    if "/" in name:
        # As if an earlier run had created the cluster.
        (directory / "data" / "PG_VERSION").write_text("18\n")
    with pytest.raises(ServerError, match="is a link"):
        PostgresServer(18, directory).start()
    assert victim.read_text() == "untouched"


def test_an_embedded_nats_server_writes_through_no_link(tmp_path: Path) -> None:
    plant(tmp_path / "server", "nats.conf", tmp_path / "victim")
    with pytest.raises(ServerError, match="is a link"):
        NatsServer(tmp_path / "server").start()
    assert (tmp_path / "victim").read_text() == "untouched"


@pytest.mark.usefixtures("umask")
def test_the_log_of_a_server_is_for_its_owner_alone(tmp_path: Path) -> None:
    process = GuardedProcess(
        "true", ["/bin/true"], log_path=tmp_path / "log", stop_signal=signal.SIGKILL
    )
    assert process.wait(10)
    assert mode(tmp_path / "log") == 0o600
