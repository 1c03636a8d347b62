"""How errors become responses: `{"error": message, "code": word}` and a status."""

import logging
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from mqmk.deploy.serving.errors import BadRequestError, RequestError, UnauthorizedError, UnprocessableError

log = logging.getLogger(__name__)


def error_response(error: RequestError) -> JSONResponse:
    """The response to a request that is rejected."""
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, UnauthorizedError):
        headers["WWW-Authenticate"] = "Bearer"
    message = str(error).encode("utf-8", "backslashreplace").decode()  # it may quote what UTF-8 cannot express
    return JSONResponse({"error": message, "code": error.code}, error.status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Whatever a route raises becomes a response of the same shape."""
    app.add_exception_handler(RequestError, _handle_request_error)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(ClientDisconnect, _handle_disconnect)
    app.add_exception_handler(Exception, _handle_unexpected)


async def _handle_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _handle_validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message = "; ".join(f"{'.'.join(str(place) for place in row['loc'])}: {row['msg']}" for row in error.errors())
    return JSONResponse({"error": message, "code": UnprocessableError.code}, 422)


async def _handle_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).name.lower()
    return JSONResponse({"error": str(error.detail), "code": code}, error.status_code, error.headers)


async def _handle_disconnect(_: Request, _error: Exception) -> Response:
    return JSONResponse({"error": "the client disconnected", "code": BadRequestError.code}, 400)


async def _handle_unexpected(_: Request, error: Exception) -> Response:
    log.exception("unhandled error in a request", exc_info=error, extra={"event": "http.unhandled_error"})
    message = f"unexpected {type(error).__name__}; see the replica's log"
    return JSONResponse({"error": message, "code": RequestError.code}, 500)
