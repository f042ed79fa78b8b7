"""Spark's Java process, started here so that it is known: it ends with this one, at any moment.

PySpark starts it too, but whoever interrupts that wait is left with a Java that nobody owns. The
protocol is PySpark's own: pyspark/java_gateway.py and PythonGatewayServer, which ends at the end
of its input.
"""

from __future__ import annotations

import atexit
import os
import shlex
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

from spark_consumer.errors import SetupError
from spark_consumer.runtime.java import start_failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_POLL_SECONDS: Final = 0.05
_KEPT_LINES: Final = 2_000
_END_SECONDS: Final = 10.0
_KILL_SECONDS: Final = 3.0
# What Java says of the flags that Spark's launcher always gives it.
_NOISE: Final = (b"WARNING: Using incubator modules", b"WARNING: package sun.")
_STDERR: Final = 2
# Ctrl-C is for us: Java and the Python processes it starts go on until we end them.
_DEAF: Final = ("/bin/sh", "-c", 'trap "" INT; exec "$0" "$@"')


class JavaProcess:
    """One process, started at most once; `kill` from another thread ends it, or keeps it from
    starting.

    Its output is held back until `tell`, then goes to standard error.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._telling = False
        self._said: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._listener: threading.Thread | None = None

    def start(self, settings: Mapping[str, str]) -> tuple[int, str]:
        """Start it; the port and the secret of its gateway. SetupError says why there is none."""
        from pyspark.find_spark_home import _find_spark_home

        command = [*_DEAF, str(Path(_find_spark_home(), "bin", "spark-submit"))]
        for key, value in settings.items():
            command += ["--conf", f"{key}={value}"]
        command += shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
        with tempfile.TemporaryDirectory(prefix="tailrace-gateway-") as directory:
            answer = Path(directory, "connection")
            try:
                process = self._launch(command, answer)
                while not answer.exists():
                    if process.poll() is not None:
                        raise SetupError(f"Spark does not start: {self._reason()}")
                    time.sleep(_POLL_SECONDS)
                return _connection(answer.read_bytes())
            except BaseException:
                self.kill()
                raise

    def _launch(self, command: list[str], answer: Path) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "SPARK_CONNECT_MODE": "0",
            "_PYSPARK_DRIVER_CONN_INFO_PATH": str(answer),
        }
        with self._lock:
            if self._killed:
                raise SetupError("Spark does not start: it was interrupted")
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._process = process
        atexit.register(self.end)
        assert process.stdout is not None
        self._listener = threading.Thread(
            target=self._listen, args=(process.stdout,), name="tailrace-java", daemon=True
        )
        self._listener.start()
        return process

    def tell(self) -> None:
        """Pass on what it has said and what it will say."""
        with self._lock:
            self._telling = True
            while self._said:
                _write(self._said.popleft())

    def said(self) -> list[str]:
        """What it has said and was not told."""
        with self._lock:
            return [line.decode(errors="replace").rstrip("\r\n") for line in self._said]

    def end(self) -> None:
        """Let it end in good order; kill it if it does not. Returns when it is gone."""
        process = self._process
        if process is None:
            return
        atexit.unregister(self.end)
        _leave_gateway()
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once, or keep it from starting."""
        with self._lock:
            self._killed = True
            process = self._process
        if process is None or process.poll() is not None:
            return
        # The first lets it remove its temporary files, the second reaches what is left.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(_KILL_SECONDS)

    def _reason(self) -> str:
        if self._listener is not None:
            self._listener.join(_END_SECONDS)
        return start_failure(self.said())

    def _listen(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                if line.startswith(_NOISE):
                    continue
                with self._lock:
                    if self._telling:
                        _write(line)
                    else:
                        self._said.append(line)


@contextmanager
def known_gateway(port: int, secret: str) -> Iterator[None]:
    """Let PySpark find a gateway that runs already, as under spark-submit."""
    names = {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


def _leave_gateway() -> None:
    """Close PySpark's side, which would go on to send what its garbage collection finds."""
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is not None:
        with suppress(Py4JError, OSError):
            gateway.shutdown()
        SparkContext._gateway = None
        SparkContext._jvm = None


def _connection(answer: bytes) -> tuple[int, str]:
    port, length = struct.unpack_from(">ii", answer)
    return port, answer[8 : 8 + length].decode()


def _write(line: bytes) -> None:
    """To standard error itself, where a child without a pipe would write."""
    with suppress(OSError):
        os.write(_STDERR, line)
