"""What can go wrong in the matcher.

MqmkError                every error of this project that a user can act on
├── BackboneError        the frozen ViT could not be found, read or understood
├── PoolError            a prompt pool could not be built, written or read
├── MatchError           a matcher cannot answer with this pool or these settings
└── ImageError           bytes that are not an image we accept
"""


class MqmkError(Exception):
    """Says what was expected, what came, and what to type next."""


class BackboneError(MqmkError):
    """The frozen ViT could not be found, read or understood."""


class PoolError(MqmkError):
    """A prompt pool could not be built, written or read."""


class MatchError(MqmkError):
    """A matcher cannot answer with this pool or these settings."""


class ImageError(MqmkError):
    """Bytes that are not an image we accept."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none, as some of Ray's and of Python's."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
