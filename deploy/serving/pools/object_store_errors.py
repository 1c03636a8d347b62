"""What an error of an object store means, and what to do about it. Shared by task buckets and pool stores."""

from dataclasses import dataclass
from typing import Final

_NO_CREDENTIALS: Final = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "DefaultCredentialsError",
)
_DENIED: Final = ("401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "Forbidden")
_MISTAKES: Final = ("ParamValidationError", "InvalidRegionError", "InvalidBucketName", "InvalidConfigError")
NO_SUCH_BUCKET: Final = "NoSuchBucket"


@dataclass(frozen=True)
class StoreFailure:
    """Why a call failed."""

    reason: str
    is_transient: bool
    """Whether a retry may succeed."""


def explain(error: BaseException, setting: str, text: str | None = None) -> StoreFailure:
    """The reason, with what to do. `setting` is the one with the URL; `text` replaces the error's own, to redact it."""
    code, kind = error_code(error), type(error).__name__
    described = f"{code or kind}: {(str(error) if text is None else text)[:300]}"
    if code == NO_SUCH_BUCKET:
        return StoreFailure(f"no such bucket; create it, or correct {setting}", False)
    if kind in _NO_CREDENTIALS:
        what = "no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or what the store uses"
        return StoreFailure(what, False)
    if isinstance(error, PermissionError) or code in _DENIED:
        what = f"{described}; check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) and their permissions"
        return StoreFailure(what, False)
    if isinstance(error, TimeoutError):
        return StoreFailure(f"no answer in time; check AWS_ENDPOINT_URL and the network ({kind})", True)
    if isinstance(error, ValueError | TypeError) or kind in _MISTAKES or code in _MISTAKES:
        return StoreFailure(f"{described}; check {setting} and the AWS_… environment", False)
    return StoreFailure(described, True)


def error_code(error: BaseException) -> str:
    """The store's own code, from its response or from the one that s3fs keeps as the cause."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
