"""The HTTP API of one replica: predict, feedback, pool, health, the pages, and the Open Inference Protocol."""

import json
from collections.abc import Sequence
from enum import Enum
from importlib.metadata import version
from importlib.resources import files
from typing import Annotated, Any, Final

from fastapi import APIRouter, FastAPI, Query, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from mqmk.deploy.serving.answer import AnswerBody, answer_json
from mqmk.deploy.serving.api_keys import AcceptsKeys, ApiKeys
from mqmk.deploy.serving.errors import BadRequestError, UnprocessableError
from mqmk.deploy.serving.feedback import FeedbackBody
from mqmk.deploy.serving.http.body import is_utf8, read_body
from mqmk.deploy.serving.http.errors import add_error_handlers
from mqmk.deploy.serving.http.middleware import AuthMiddleware, MetricsMiddleware
from mqmk.deploy.serving.http.multipart import parse_multipart
from mqmk.deploy.serving.http.oip_routes import v2_routes
from mqmk.deploy.serving.http.pool_pages import MAX_PAGE, MAX_SEARCH, PAGE, Order, PageChoice, pool_page
from mqmk.deploy.serving.http.request_state import request_id_of, set_matcher, set_timings
from mqmk.deploy.serving.http.schemas import (
    LABEL_LENGTH,
    ErrorBody,
    FeedbackIn,
    PoolBody,
    ReadyBody,
)
from mqmk.deploy.serving.inference import CHOICES, MAX_TOP, PredictOptions, Service

MatcherName = Enum("MatcherName", {name: name for name in CHOICES}, type=str)  # type: ignore[misc]
_FEEDBACK_BYTES: Final = 32_000  # two strings of maximum length, each character escaped to up to 12 bytes
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_REJECTIONS: Final[dict[int | str, dict[str, Any]]] = {
    code: {"model": ErrorBody} for code in (400, 401, 413, 415, 422, 429, 503)
}
_BINARY = {"type": "string", "format": "binary"}
_FORM = {
    "type": "object",
    "properties": {"image": {"type": "array", "items": _BINARY, "minItems": 1}},
    "required": ["image"],
}
_PREDICT_DOC = {
    "requestBody": {
        "required": True,
        "description": "The bytes of a JPEG, PNG or WebP image, or a form with one or more fields `image`.",
        "content": {
            "image/jpeg": {"schema": _BINARY},
            "image/png": {"schema": _BINARY},
            "image/webp": {"schema": _BINARY},
            "multipart/form-data": {"schema": _FORM},
        },
    }
}
_FEEDBACK_DOC = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": FeedbackIn.model_json_schema()}}}
}


def build_api(service: Service, keys: AcceptsKeys | None = None, *, echo_id: bool = True) -> FastAPI:
    """The ASGI application of one replica."""
    app = FastAPI(title="mqmk-daemon", version=version("mqmk-daemon"), docs_url=None, redoc_url=None,
                  redirect_slashes=False)  # fmt: skip
    app.add_middleware(AuthMiddleware, keys=keys or ApiKeys(), echo_id=echo_id)
    app.add_middleware(MetricsMiddleware, metrics=service.metrics)  # the last one added is the outermost
    app.include_router(_predict_routes(service))
    app.include_router(_probes(service))
    app.include_router(_pages())
    app.include_router(v2_routes(service))
    add_error_handlers(app)
    return app


def _predict_routes(service: Service) -> APIRouter:
    router = APIRouter()
    spec = service.spec

    @router.post("/predict", responses=_REJECTIONS | {200: {"model": AnswerBody | list[AnswerBody]}},
                 openapi_extra=_PREDICT_DOC)  # fmt: skip
    async def predict(
        request: Request,
        matcher: Annotated[MatcherName | None, Query(description="how the task is found")] = None,
        top_k: Annotated[int | None, Query(ge=1, le=MAX_TOP, description="how many classes to return")] = None,
        scores: Annotated[bool, Query(description="include the match score of every task")] = False,
    ) -> Response:
        """Classify an image. Several images in one form give a list of answers, all from one pool version."""
        content_type = request.headers.get("content-type", "")
        body = await read_body(request, spec.serve.request_bytes)
        images = [service.from_bytes(data) for data in _split_images(content_type, body)]
        options = PredictOptions(None if matcher is None else str(matcher.value), top_k, scores)
        set_matcher(request, service.matcher_of(options))
        result = await service.predict(request_id_of(request), images, options)
        set_timings(request, result.stages)
        bodies = [answer_json(answer) for answer in result.answers]
        return JSONResponse(bodies[0] if len(bodies) == 1 else bodies)

    @router.post("/feedback", responses=_REJECTIONS | {200: {"model": FeedbackBody}, 404: {"model": ErrorBody}},
                 openapi_extra=_FEEDBACK_DOC)  # fmt: skip
    async def feedback(request: Request) -> Response:
        """Send the true label of an answer. It is counted once; no image is stored."""
        label = _parse_feedback(await read_body(request, _FEEDBACK_BYTES))
        return JSONResponse(vars(await service.feedback(label.id, label.label)))

    @router.get("/pool", responses={200: {"model": PoolBody}, 304: {"description": "not modified"},
                                    401: {"model": ErrorBody}, 422: {"model": ErrorBody}})  # fmt: skip
    async def pool(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="tasks in a page")] = PAGE,
        offset: Annotated[int, Query(ge=0, description="tasks before the page")] = 0,
        search: Annotated[str, Query(max_length=MAX_SEARCH, description="text in the name of a task or class")] = "",
        order: Annotated[Order, Query(description="by when the tasks were learned")] = "oldest",
    ) -> Response:
        """What has been learned so far, a page of tasks at a time."""
        loaded = service.live_pool.loaded
        tag = f'"{loaded.pointer.digest[:16]}"' if loaded else '"nothing"'
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if tag in _tags(request.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=headers)
        choice = PageChoice(limit, offset, search, order)
        body = pool_page(loaded, service.backbone, spec.serve.matcher, choice)
        return Response(body, media_type="application/json", headers=headers)

    return router


def _probes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/healthz")
    async def healthz() -> dict[str, bool]:
        """Liveness of this replica."""
        return {"ok": True}

    @router.get("/readyz", responses={200: {"model": ReadyBody}, 503: {"model": ErrorBody}})
    async def readyz() -> Response:
        """Readiness of this replica: it has loaded a pool with at least one task."""
        version, current = service.require_pool().version, service.live_pool.last_rejection is None
        return JSONResponse({"ready": True, "pool_version": version, "current": current})

    return router


def _pages() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    texts = {name: files(__package__).joinpath("pages", f"{name}.html").read_text() for name in ("index", "docs")}

    @router.get("/")
    async def index() -> Response:
        """The console."""
        return HTMLResponse(texts["index"], headers=_PAGE_HEADERS)

    @router.get("/docs")
    async def docs() -> Response:
        """The OpenAPI document as a page, without external resources."""
        return HTMLResponse(texts["docs"], headers=_PAGE_HEADERS)

    return router


def _tags(condition: str) -> list[str]:
    """The tags of an If-None-Match; proxies that compress make them weak."""
    return [tag.strip().removeprefix("W/") for tag in condition.split(",")]


def _split_images(content_type: str, body: bytes) -> Sequence[bytes]:
    """The format is detected from the bytes: clients send raw bytes with all kinds of content types."""
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        found = [body]
    else:
        found = [part.content for part in parse_multipart(content_type, body) if part.name in ("image", "file")]
    if not found or not all(found):
        raise BadRequestError("expected an image as the body, or a multipart form with a field `image`; got neither")
    return found


def _parse_feedback(body: bytes) -> FeedbackIn:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError('expected JSON: {"id": "…", "label": "…"}') from error
    values = [fields.get(name) for name in ("id", "label")] if isinstance(fields, dict) else []
    texts = [value for value in values if isinstance(value, str) and 1 <= len(value) <= LABEL_LENGTH and is_utf8(value)]
    if len(texts) != 2:
        raise UnprocessableError('expected two strings: {"id": "…", "label": "…"}')
    return FeedbackIn(id=texts[0], label=texts[1])
