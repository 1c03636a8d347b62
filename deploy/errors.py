"""What can go wrong in serving.

MqmkError
├── ServeError           the service could not be started as configured
└── RequestError         a request that is answered with `status` and {"error": message}
    ├── BadRequestError       400  not understood
    ├── UnauthorizedError     401  no valid API key
    ├── NotRememberedError    404  feedback on an answer that is not remembered (any more)
    ├── TooLargeError         413  too many bytes, pixels or pictures
    ├── WrongMediaTypeError   415  not a JPEG, PNG or WebP picture
    ├── UnprocessableError    422  understood, but the picture is damaged or a value is out of range
    ├── BusyError             429  the queue is full; Retry-After
    └── NotReadyError         503  nothing learned yet, or it took too long; Retry-After
"""

from mqmk.matcher.errors import MqmkError


class ServeError(MqmkError):
    """The service could not be started as configured."""


class RequestError(MqmkError):
    """A request that is answered with an error."""

    status = 500
    retry_after: int | None = None
    """Seconds after which the same request may succeed."""


class BadRequestError(RequestError):
    """Not understood."""

    status = 400


class UnauthorizedError(RequestError):
    """No valid API key."""

    status = 401


class NotRememberedError(RequestError):
    """Feedback on an answer that is not remembered."""

    status = 404


class TooLargeError(RequestError):
    """Too many bytes, pixels or pictures."""

    status = 413


class WrongMediaTypeError(RequestError):
    """Not a picture of a kind we read."""

    status = 415


class UnprocessableError(RequestError):
    """Understood, but impossible."""

    status = 422


class BusyError(RequestError):
    """The queue is full."""

    status, retry_after = 429, 1


class NotReadyError(RequestError):
    """Nothing learned yet, or it took too long."""

    status, retry_after = 503, 5
