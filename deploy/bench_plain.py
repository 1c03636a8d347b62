"""Servers without Ray to compare with: our API on uvicorn, and the few lines of FastAPI around the predictor that
anybody would write. Each is a process of its own.

    python -m mqmk.deploy.bench_plain {api,lines} POOLS BACKBONE WEIGHTS THREADS PORT
"""

import socket
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

from mqmk.deploy.api import build_api
from mqmk.deploy.errors import ServeError
from mqmk.deploy.pool_holder import PoolHolder
from mqmk.deploy.service import Service
from mqmk.deploy.settings import ServeSettings
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.images import decode, prepare
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.predictor import PredictSettings, name_answers, predict
from mqmk.matcher.prompted_vit import FrozenViT


@contextmanager
def plain_server(kind: str, settings: ServeSettings) -> Iterator[str]:
    """Its address, once it answers; it ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = (kind, settings.pools, settings.backbone, settings.weights, settings.threads, port)
    process = subprocess.Popen([sys.executable, "-m", __name__, *map(str, given)])
    try:
        _wait(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", url: str) -> None:
    while process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{url}/openapi.json", timeout=5):
            return
        time.sleep(0.1)
    raise ServeError("the plain server ended; its error is on standard error")


def _few_lines(vit: FrozenViT, pool: PromptPool, settings: PredictSettings) -> FastAPI:
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
    settings = ServeSettings(Path(pools), backbone=backbone, weights=weights)
    vit, predicting = load_backbone(backbone, weights=weights), PredictSettings(settings.matcher, settings.budget)
    holder = PoolHolder(PoolStore(settings.pools), vit, predicting)
    holder.look()
    assert holder.held is not None
    few_lines = _few_lines(vit, holder.held.pool, predicting)
    app = few_lines if kind == "lines" else build_api(Service(vit, holder, settings))
    uvicorn.run(app, port=int(port), log_level="error", ws="none")


if __name__ == "__main__":
    main(*sys.argv[1:])
