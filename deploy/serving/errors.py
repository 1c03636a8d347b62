"""The error tree of serving, and the status of each request error.

MqmkError
├── ServeError           the service could not be started as configured
└── RequestError         a request that is rejected with `status` and {"error": message, "code": `code`}
    ├── BadRequestError       400  malformed
    ├── UnauthorizedError     401  no valid API key
    ├── UnknownRequestIdError    404  feedback on an answer that is no longer remembered
    ├── TooLargeError         413  too many bytes, pixels or images
    ├── WrongMediaTypeError   415  not a JPEG, PNG or WebP image
    ├── UnprocessableError    422  well-formed, but the image is damaged or a value is out of range
    ├── BusyError             429  the queue is full; Retry-After
    └── NotReadyError         503  no answer in time; Retry-After
        └── NothingLearnedError    there is no task to match
"""

from mqmk.matcher.errors import MqmkError


class ServeError(MqmkError):
    """The service could not be started as configured."""


class RequestError(MqmkError):
    """A request that is rejected."""

    status, code = 500, "unexpected"
    """The HTTP status, and a word for programs."""
    retry_after: int | None = None
    """Seconds after which the same request may succeed."""


class BadRequestError(RequestError):
    """Malformed."""

    status, code = 400, "bad_request"


class UnauthorizedError(RequestError):
    """No valid API key."""

    status, code = 401, "unauthorized"


class UnknownRequestIdError(RequestError):
    """Feedback on an answer that is not remembered."""

    status, code = 404, "not_remembered"


class TooLargeError(RequestError):
    """Too many bytes, pixels or images."""

    status, code = 413, "too_large"


class WrongMediaTypeError(RequestError):
    """Not an image in an accepted format."""

    status, code = 415, "wrong_media_type"


class UnprocessableError(RequestError):
    """Well-formed, but invalid."""

    status, code = 422, "unprocessable"


class BusyError(RequestError):
    """The queue is full."""

    status, code, retry_after = 429, "busy", 1


class NotReadyError(RequestError):
    """No answer in time, or nothing to answer with yet."""

    status, code, retry_after = 503, "unavailable", 5


class NothingLearnedError(NotReadyError):
    """There is no task to match."""

    code = "nothing_learned"
