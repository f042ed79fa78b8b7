"""The embedded servers, for the demonstration and the tests alike.

`PostgresServer` and `NatsServer` start the real programs on free loopback ports, as root too, and
leave no process behind whatever happens to the process that started them.
"""

from __future__ import annotations

from bridge.embedded.guarded_process import ServerError, free_port
from bridge.embedded.nats import NatsCluster, NatsServer
from bridge.embedded.postgres import PostgresServer

__all__ = ["NatsCluster", "NatsServer", "PostgresServer", "ServerError", "free_port"]
