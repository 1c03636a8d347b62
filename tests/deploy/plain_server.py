"""The API of one replica on a plain uvicorn server, with the watcher that follows CURRENT; no Ray."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from mqmk.deploy.api import build_api
from mqmk.deploy.pool_holder import PoolHolder, Watcher
from mqmk.deploy.service import Service
from mqmk.deploy.settings import ServeSettings
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.predictor import PredictSettings
from mqmk.matcher.prompted_vit import FrozenViT


@contextmanager
def served(vit: FrozenViT, pools: Path) -> Iterator[str]:
    """Its address."""
    holder = PoolHolder(PoolStore(pools), vit, PredictSettings())
    holder.look()
    watcher = Watcher(holder, 0.1, lambda: None)
    watcher.start()
    service = Service(vit, holder, ServeSettings(pools))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(build_api(service), port=port, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
        watcher.stop()
        service.close()
