"""Errors of Serve's own proxy have the shape of a replica's."""

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from mqmk.deploy.serving.ray_compat.json_errors import proxy_middlewares


async def answer(request: Request) -> Response:
    match request.url.path:
        case "/gone" | "/-/routes":
            return PlainTextResponse("Deployment is unavailable because it failed to deploy.", 503)
        case "/slow":
            return StreamingResponse(iter((b"Request timed ", b"out")), 408, {"X-Request-ID": "7"}, "text/plain")
        case "/empty":
            return Response(status_code=500)
        case "/ours":
            return JSONResponse({"error": "no image", "code": "bad_request"}, 400)
        case _:
            return PlainTextResponse("all is well")


@pytest.fixture
def client() -> TestClient:
    return TestClient(Starlette(routes=[Route("/{path:path}", answer)], middleware=proxy_middlewares()))


@pytest.mark.parametrize(
    ("path", "status", "error", "code"),
    [
        ("/gone", 503, "Deployment is unavailable because it failed to deploy.", "service_unavailable"),
        ("/slow", 408, "Request timed out", "request_timeout"),
        ("/empty", 500, "Internal Server Error", "internal_server_error"),
        ("/ours", 400, "no image", "bad_request"),
    ],
)
def test_an_error_in_plain_text_becomes_json(client: TestClient, path: str, status: int, error: str, code: str) -> None:
    response = client.get(path)
    assert (response.status_code, response.json()) == (status, {"error": error, "code": code})
    assert int(response.headers["content-length"]) == len(response.content)


def test_a_missing_replica_says_when_to_retry(client: TestClient) -> None:
    assert client.get("/gone").headers["retry-after"] == "5"
    slow = client.get("/slow").headers
    assert "retry-after" not in slow and slow["x-request-id"] == "7"


def test_other_answers_and_rays_own_routes_pass_unchanged(client: TestClient) -> None:
    assert client.get("/").text == "all is well"
    assert client.get("/-/routes").text == "Deployment is unavailable because it failed to deploy."
