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
