"""What in a text is nobody's business: the password in a URL, and whatever is called password, key or token there."""

import re
from typing import Final

_LOGIN: Final = re.compile(r"(?<=://)([^/@\s:]*):\S*@")
"""`name:password@`; up to the last @, because passwords may hold slashes and more of them."""
_NAME: Final = re.compile(r"(?<=://)[^/@\s:]+@")
"""A name alone may be a token."""
_QUERY: Final = re.compile(r"([?&][^=&\s]*(?:password|secret|token|key)[^=&\s]*=)[^&\s]+", re.IGNORECASE)


def hidden(text: str) -> str:
    """The text with `***` in their place; harmless to do twice."""
    return _NAME.sub("***@", _LOGIN.sub(r"\1:***@", _QUERY.sub(r"\1***", text)))
