"""Redacts secrets in text: passwords in URLs, and query parameters called password, secret, token or key."""

import re
from typing import Final

_LOGIN: Final = re.compile(r"(?<=://)([^/@\s:]*):\S*@")
"""`name:password@`; up to the last @, because passwords may contain slashes and @."""
_NAME: Final = re.compile(r"(?<=://)[^/@\s:]+@")
"""A name alone may be a token."""
_QUERY: Final = re.compile(r"([?&][^=&\s]*(?:password|secret|token|key)[^=&\s]*=)[^&\s]+", re.IGNORECASE)


def redact(text: str) -> str:
    """The text with `***` in their place; idempotent."""
    return _NAME.sub("***@", _LOGIN.sub(r"\1:***@", _QUERY.sub(r"\1***", text)))
