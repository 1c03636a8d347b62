"""The API of one replica on a plain uvicorn server, with the watcher that follows CURRENT; no Ray."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from mqmk.daemon.ports import free_port
from mqmk.deploy.serving.api_keys import ApiKeys, hash_key
from mqmk.deploy.serving.http.app import build_api
from mqmk.deploy.serving.inference import Service
from mqmk.deploy.serving.pools.live_pool import LivePool
from mqmk.deploy.serving.repeating_thread import RepeatingThread
from mqmk.deploy.serving.settings import ServiceSpec
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.predictor import PredictSettings
from mqmk.matcher.prompted_vit import FrozenViT


@contextmanager
def served(vit: FrozenViT, pools: Path, *keys: str) -> Iterator[str]:
    """Yields its address. With keys, it requires one of them."""
    live_pool = LivePool(PoolStore(pools), vit, PredictSettings())
    live_pool.poll()
    watcher = RepeatingThread("pool-watcher", live_pool.poll, 0.1)
    watcher.start()
    service = Service(vit, live_pool, ServiceSpec(pools))
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
