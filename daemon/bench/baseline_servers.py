"""Baseline servers without Ray: our API on uvicorn, and a minimal FastAPI app around the predictor. Each is a separate
process.

    python -m mqmk.daemon.bench.baseline_servers {api,lines} POOLS BACKBONE WEIGHTS THREADS PORT
"""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from mqmk.daemon.ports import free_port
from mqmk.deploy.serving.errors import ServeError
from mqmk.deploy.serving.http.app import build_api
from mqmk.deploy.serving.inference import Service
from mqmk.deploy.serving.pools.live_pool import LivePool
from mqmk.deploy.serving.settings import ServiceSpec
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.images import decode, prepare
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.predictor import PredictSettings, name_answers, predict
from mqmk.matcher.prompted_vit import FrozenViT


@contextmanager
def plain_server(kind: str, spec: ServiceSpec) -> Iterator[str]:
    """Start a server; yields its URL once it answers, and stops it with the block."""
    port = free_port()
    given = (kind, spec.pools, spec.backbone, spec.weights, spec.threads, port)
    process = subprocess.Popen([sys.executable, "-m", __name__, *map(str, given)])
    try:
        _wait_until_up(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _wait_until_up(process: "subprocess.Popen[bytes]", url: str) -> None:
    while process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{url}/openapi.json", timeout=5):
            return
        time.sleep(0.1)
    raise ServeError("the plain server exited; see its error on standard error")


def _minimal_app(vit: FrozenViT, pool: PromptPool, settings: PredictSettings) -> FastAPI:
    app = FastAPI()

    def answer(data: bytes) -> Response:
        images = prepare(decode(data), vit.info)[None].to(vit.device)
        found = name_answers(pool, predict(vit, pool, images, settings))[0]
        return JSONResponse({"label": found.label, "probability": found.probability, "task": found.task})

    @app.post("/predict")
    async def route(request: Request) -> Response:
        return await run_in_threadpool(answer, await request.body())

    return app


def main(kind: str, pools: str, backbone: str, weights: str, threads: str, port: str) -> None:
    """One server."""
    torch.set_num_threads(int(threads))
    spec = ServiceSpec(Path(pools), backbone=backbone, weights=weights)
    vit, predicting = load_backbone(backbone, weights=weights), PredictSettings(spec.serve.matcher, spec.serve.budget)
    live_pool = LivePool(PoolStore(spec.pools), vit, predicting)
    live_pool.poll()
    assert live_pool.loaded is not None
    minimal = _minimal_app(vit, live_pool.loaded.pool, predicting)
    app = minimal if kind == "lines" else build_api(Service(vit, live_pool, spec))
    uvicorn.run(app, port=int(port), log_level="error", ws="none")


if __name__ == "__main__":
    main(*sys.argv[1:])
