"""The routes of the Open Inference Protocol, version 2."""

from importlib.metadata import version

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mqmk.deploy.serving.errors import NothingLearnedError, UnprocessableError
from mqmk.deploy.serving.http.body import read_body
from mqmk.deploy.serving.http.oip_codec import HEADER_LENGTH, INPUT, MODEL, OUTPUTS, parse_infer, render_infer
from mqmk.deploy.serving.http.request_state import request_id_of, set_matcher, set_timings
from mqmk.deploy.serving.http.schemas import ErrorBody
from mqmk.deploy.serving.inference import CHOICES, PredictOptions, Service

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
_REJECTIONS = {code: {"model": ErrorBody} for code in (400, 401, 413, 415, 422, 429, 503)}


def v2_routes(service: Service) -> APIRouter:
    """Health, metadata and inference."""
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol v2"])

    def readiness(body: dict[str, object]) -> JSONResponse:
        try:
            service.require_pool()
        except NothingLearnedError as error:
            return JSONResponse(body | {"ready": False, "error": str(error), "code": error.code}, error.status)
        return JSONResponse(body | {"ready": True})

    @router.get("/health/live")
    async def live() -> dict[str, bool]:
        """Server liveness."""
        return {"live": True}

    @router.get("/health/ready", responses={503: {"model": ErrorBody}})
    async def ready() -> Response:
        """Server readiness: a pool with at least one task is loaded."""
        return readiness({})

    @router.get("", responses={401: {"model": ErrorBody}})
    async def server() -> dict[str, object]:
        """Server metadata."""
        return {"name": "mqmk-daemon", "version": version("mqmk-daemon"), "extensions": ["binary_tensor_data"]}

    @router.get(f"/models/{MODEL}", responses={401: {"model": ErrorBody}})
    async def model() -> dict[str, object]:
        """Model metadata: inputs and outputs."""
        loaded = service.live_pool.loaded
        versions = [str(loaded.version)] if loaded else []
        return {"name": MODEL, "versions": versions, "platform": "mqmk", "inputs": [INPUT], "outputs": OUTPUTS}

    @router.get(f"/models/{MODEL}/ready", responses={401: {"model": ErrorBody}, 503: {"model": ErrorBody}})
    async def model_ready() -> Response:
        """Model readiness; the same as health/ready, since there is one model."""
        return readiness({"name": MODEL})

    @router.post(f"/models/{MODEL}/infer", responses=_REJECTIONS, openapi_extra=_INFER_DOC)  # type: ignore[arg-type]
    async def infer(request: Request) -> Response:
        """Classify a tensor of images."""
        spec = service.spec
        body = await read_body(request, spec.serve.request_bytes)
        length = request.headers.get(HEADER_LENGTH)
        parsed = await service.run_in_thread(parse_infer, body, length, service.from_bytes, spec.pixels)
        if parsed.matcher is not None and parsed.matcher not in CHOICES:
            raise UnprocessableError(f"unknown matcher {parsed.matcher[:50]!r}; choose from {', '.join(CHOICES)}")
        request_id, options = parsed.id or request_id_of(request), PredictOptions(parsed.matcher)
        set_matcher(request, service.matcher_of(options))
        result = await service.predict(request_id, parsed.images, options)
        set_timings(request, result.stages)
        rendered = render_infer(parsed, request_id, result.answers)
        if rendered.header_length is None:
            return Response(rendered.body, media_type="application/json")
        headers = {HEADER_LENGTH: str(rendered.header_length)}
        return Response(rendered.body, headers=headers, media_type="application/octet-stream")

    return router
