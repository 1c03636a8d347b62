"""Keeps the port that Ray opens in every replica, for calls between deployments, on loopback.

Ray 2.60 opens it on all addresses (`[::]:0` is hard-coded), requires its token there, and has no setting to move or
close it. Calls between our replicas go through Ray actors, so nothing uses it.
"""

import logging
from typing import Any

from mqmk.deploy.serving.settings import is_loopback

log = logging.getLogger(__name__)
_EVERYWHERE, _HERE = "[::]:", "127.0.0.1:"


def keep_on_loopback(node_address: str) -> None:
    """Call in a replica's constructor, before Ray opens the port; does nothing in a real cluster.

    This patches Ray's internals. If they have changed, the port stays as Ray opens it, and the test of listening
    addresses fails.
    """
    if not is_loopback(node_address):
        return
    from ray.serve._private import replica

    parts: Any = replica
    add_port = getattr(parts, "add_port_to_grpc_server", None)
    if add_port is None:
        log.warning("Ray's port for calls between deployments may be exposed", extra={"event": "replica.port_exposed"})
        return

    def add_port_here(server: Any, address: str) -> Any:
        return add_port(server, address.replace(_EVERYWHERE, _HERE))

    parts.add_port_to_grpc_server = add_port_here
