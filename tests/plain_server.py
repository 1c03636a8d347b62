"""The API of one replica on a plain uvicorn server, with the watcher that follows CURRENT; no Ray."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from ports import free_port

from mqmk.deploy.api import build_api
from mqmk.deploy.keys import ApiKeys, hash_key
from mqmk.deploy.pool_holder import PoolHolder, Watcher
from mqmk.deploy.service import Service
from mqmk.deploy.settings import ServeSettings
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.predictor import PredictSettings
from mqmk.matcher.prompted_vit import FrozenViT


@contextmanager
def served(vit: FrozenViT, pools: Path, *keys: str) -> Iterator[str]:
    """Its address. With keys, it asks for one of them."""
    holder = PoolHolder(PoolStore(pools), vit, PredictSettings())
    holder.look()
    watcher = Watcher(holder, 0.1, lambda: None)
    watcher.start()
    service = Service(vit, holder, ServeSettings(pools))
    app, port = build_api(service, ApiKeys(tuple(map(hash_key, keys)))), free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", ws="none"))
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
