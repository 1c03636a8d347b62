"""The HTTP API of one replica: predict, feedback, pool, the pages, and the Open Inference Protocol beside them."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from importlib.metadata import version
from importlib.resources import files
from typing import Annotated, Any, Final

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response

from mqmk.deploy.api_v2 import v2_routes
from mqmk.deploy.doorman import Doorman, error_response, is_utf8, read_body, request_id_of
from mqmk.deploy.errors import BadRequestError, RequestError, UnprocessableError
from mqmk.deploy.keys import ApiKeys
from mqmk.deploy.multipart import parse_multipart
from mqmk.deploy.request_tally import RequestTally, note_answers, note_matcher
from mqmk.deploy.schemas import (
    LABEL_LENGTH,
    AnswerBody,
    ErrorBody,
    FeedbackBody,
    FeedbackIn,
    PoolBody,
    answers_body,
    pool_body,
)
from mqmk.deploy.service import CHOICES, Question, Service

log = logging.getLogger(__name__)

MatcherName = Enum("MatcherName", {name: name for name in CHOICES}, type=str)  # type: ignore[misc]
_FEEDBACK_BYTES: Final = 32_000  # two texts of the longest length, each character escaped to up to 12 bytes
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_REFUSED: Final[dict[int | str, dict[str, Any]]] = {
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
        "description": "The bytes of a JPEG, PNG or WebP picture, or a form with one or more fields `image`.",
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


def build_api(service: Service, keys: ApiKeys | None = None, *, echo_id: bool = True) -> FastAPI:
    """The ASGI application of one replica."""
    app = FastAPI(title="mqmk-daemon", version=version("mqmk-daemon"), docs_url=None, redoc_url=None,
                  redirect_slashes=False)  # fmt: skip
    app.add_middleware(Doorman, keys=keys or ApiKeys(), echo_id=echo_id)
    app.add_middleware(RequestTally, measures=service.measures)  # the last one added is the outermost
    app.include_router(_predict_routes(service))
    app.include_router(_pages())
    app.include_router(v2_routes(service))
    app.add_exception_handler(RequestError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(ClientDisconnect, _answer_gone)
    app.add_exception_handler(Exception, _answer_unexpected)
    return app


def _predict_routes(service: Service) -> APIRouter:
    router = APIRouter()
    settings = service.settings

    @router.post("/predict", responses=_REFUSED | {200: {"model": AnswerBody | list[AnswerBody]}},
                 openapi_extra=_PREDICT_DOC)  # fmt: skip
    async def predict(
        request: Request,
        matcher: Annotated[MatcherName | None, Query(description="how the task is found")] = None,
        top_k: Annotated[int | None, Query(ge=1, le=100, description="how many classes to list")] = None,
        scores: Annotated[bool, Query(description="add the match score of every task")] = False,
    ) -> Response:
        """Say what is in a picture; several pictures in one form give a list of answers, from one pool."""
        content_type = request.headers.get("content-type", "")
        body = await read_body(request, settings.request_bytes)
        pictures = [service.from_bytes(data) for data in _pictures(content_type, body)]
        question = Question(None if matcher is None else str(matcher.value), top_k)
        note_matcher(request, service.matcher_of(question))
        answers = await service.predict(request_id_of(request), pictures, question)
        note_answers(request, answers)
        return JSONResponse(answers_body(answers, scores))

    @router.post("/feedback", responses=_REFUSED | {200: {"model": FeedbackBody}, 404: {"model": ErrorBody}},
                 openapi_extra=_FEEDBACK_DOC)  # fmt: skip
    async def feedback(request: Request) -> Response:
        """Tell the true label of an answer; it is counted once, and no picture is kept."""
        told = _feedback(await read_body(request, _FEEDBACK_BYTES))
        return JSONResponse(asdict(await service.feedback(told.id, told.label)))

    @router.get(
        "/pool",
        responses={200: {"model": PoolBody}, 401: {"model": ErrorBody}, 304: {"description": "as If-None-Match says"}},
    )
    async def pool(request: Request) -> Response:
        """What has been learned so far."""
        held = service.holder.held
        tag = f'"{held.pointer.digest[:16]}"' if held else '"nothing"'
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return JSONResponse(pool_body(held, service.backbone, settings.matcher), headers=headers)

    return router


def _pages() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    texts = {name: files("mqmk.deploy").joinpath("page", f"{name}.html").read_text() for name in ("index", "docs")}

    @router.get("/")
    async def index() -> Response:
        """A page to try it."""
        return HTMLResponse(texts["index"], headers=_PAGE_HEADERS)

    @router.get("/docs")
    async def docs() -> Response:
        """The OpenAPI document, readable; without anything from the network."""
        return HTMLResponse(texts["docs"], headers=_PAGE_HEADERS)

    return router


def _pictures(content_type: str, body: bytes) -> Sequence[bytes]:
    """What a picture is, its bytes say: clients send all kinds of content types with raw bytes."""
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        found = [body]
    else:
        found = [part.content for part in parse_multipart(content_type, body) if part.name == "image"]
    if not found or not all(found):
        raise BadRequestError("expected the bytes of a picture, or a multipart form with a field `image`; got none")
    return found


def _feedback(body: bytes) -> FeedbackIn:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError('expected JSON: {"id": "…", "label": "…"}') from error
    values = [fields.get(name) for name in ("id", "label")] if isinstance(fields, dict) else []
    texts = [value for value in values if isinstance(value, str) and 1 <= len(value) <= LABEL_LENGTH and is_utf8(value)]
    if len(texts) != 2:
        raise UnprocessableError('expected two texts: {"id": "…", "label": "…"}')
    return FeedbackIn(id=texts[0], label=texts[1])


async def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _answer_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = "; ".join(f"{'.'.join(str(place) for place in row['loc'])}: {row['msg']}" for row in error.errors())
    return JSONResponse({"error": found}, 422)


async def _answer_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)


async def _answer_gone(_: Request, _error: Exception) -> Response:
    return JSONResponse({"error": "the client went away"}, 400)


async def _answer_unexpected(_: Request, error: Exception) -> Response:
    log.exception("an unexpected error", exc_info=error, extra={"event": "unexpected"})
    return JSONResponse({"error": f"unexpected: {type(error).__name__}; the replica's log has more"}, 500)
