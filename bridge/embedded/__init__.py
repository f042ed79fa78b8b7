"""Real PostgreSQL and NATS servers from Python wheels, for the demo and the tests.

They listen on free loopback ports, run as root too, and leave no process behind however the process
that started them ends.
"""

from bridge.embedded.guarded_process import (
    LOOPBACK,
    GuardedProcess,
    ServerError,
    free_port,
    port_is_free,
)
from bridge.embedded.nats import NatsCluster, NatsServer
from bridge.embedded.postgres import PostgresServer

__all__ = [
    "LOOPBACK",
    "GuardedProcess",
    "NatsCluster",
    "NatsServer",
    "PostgresServer",
    "ServerError",
    "free_port",
    "port_is_free",
]
