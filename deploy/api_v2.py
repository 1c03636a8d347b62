"""The routes of the Open Inference Protocol, version 2."""

from importlib.metadata import version

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mqmk.deploy.doorman import read_body, request_id_of
from mqmk.deploy.errors import UnprocessableError
from mqmk.deploy.inference_protocol import HEADER_LENGTH, INPUT, MODEL, OUTPUTS, parse_infer, render_infer
from mqmk.deploy.request_tally import note_answers, note_matcher
from mqmk.deploy.schemas import ErrorBody
from mqmk.deploy.service import CHOICES, NOTHING_LEARNED, Question, Service

_TENSOR = {
    "type": "object",
    "properties": {
        "name": {"const": "image"},
        "datatype": {"enum": ["BYTES", "UINT8"]},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
        "data": {"type": "array"},
        "parameters": {"type": "object", "properties": {"binary_data_size": {"type": "integer"}}},
    },
    "required": ["name", "datatype", "shape"],
}
_INFER = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "inputs": {"type": "array", "items": _TENSOR, "minItems": 1, "maxItems": 1},
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"enum": [row["name"] for row in OUTPUTS]}},
                "required": ["name"],
            },
        },
        "parameters": {"type": "object", "properties": {"matcher": {"enum": list(CHOICES)}}},
    },
    "required": ["inputs"],
}
_INFER_DOC = {
    "requestBody": {
        "required": True,
        "description": "inputs: one tensor `image`, BYTES [n] (base64 in JSON) or UINT8 [n, height, width, 3]",
        "content": {"application/json": {"schema": _INFER}, "application/octet-stream": {}},
    }
}
_REFUSED = {code: {"model": ErrorBody} for code in (400, 401, 413, 415, 422, 429, 503)}


def v2_routes(service: Service) -> APIRouter:
    """Health, metadata and inference."""
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol v2"])

    def readiness(body: dict[str, object]) -> JSONResponse:
        if service.ready:
            return JSONResponse(body | {"ready": True})
        return JSONResponse(body | {"ready": False, "error": NOTHING_LEARNED}, 503)

    @router.get("/health/live")
    async def live() -> dict[str, bool]:
        """Whether the service runs."""
        return {"live": True}

    @router.get("/health/ready", responses={503: {"model": ErrorBody}})
    async def ready() -> Response:
        """Whether it can answer: it holds a pool with at least one task."""
        return readiness({})

    @router.get("", responses={401: {"model": ErrorBody}})
    async def server() -> dict[str, object]:
        """What this server is."""
        return {"name": "mqmk-daemon", "version": version("mqmk-daemon"), "extensions": ["binary_tensor_data"]}

    @router.get(f"/models/{MODEL}", responses={401: {"model": ErrorBody}})
    async def model() -> dict[str, object]:
        """What goes in and what comes out."""
        held = service.holder.held
        versions = [str(held.version)] if held else []
        return {"name": MODEL, "versions": versions, "platform": "mqmk", "inputs": [INPUT], "outputs": OUTPUTS}

    @router.get(f"/models/{MODEL}/ready", responses={401: {"model": ErrorBody}, 503: {"model": ErrorBody}})
    async def model_ready() -> Response:
        """The same as health/ready: there is one model."""
        return readiness({"name": MODEL})

    @router.post(f"/models/{MODEL}/infer", responses=_REFUSED, openapi_extra=_INFER_DOC)  # type: ignore[arg-type]
    async def infer(request: Request) -> Response:
        """Answer a tensor of pictures."""
        settings = service.settings
        body = await read_body(request, settings.request_bytes)
        length = request.headers.get(HEADER_LENGTH)
        asked = await service.aside(parse_infer, body, length, service.from_bytes, settings.pixels)
        if asked.matcher is not None and asked.matcher not in CHOICES:
            raise UnprocessableError(f"no matcher is called {asked.matcher[:50]!r}; choose from {', '.join(CHOICES)}")
        request_id, question = asked.id or request_id_of(request), Question(asked.matcher)
        note_matcher(request, service.matcher_of(question))
        answers = await service.predict(request_id, asked.pictures, question)
        note_answers(request, answers)
        found = render_infer(asked, request_id, answers)
        if found.header_length is None:
            return Response(found.body, media_type="application/json")
        headers = {HEADER_LENGTH: str(found.header_length)}
        return Response(found.body, headers=headers, media_type="application/octet-stream")

    return router
