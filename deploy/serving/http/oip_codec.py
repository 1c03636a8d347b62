"""The Open Inference Protocol, version 2: tensors of images in, tensors of answers out, as JSON or binary.

Input `image`: BYTES [n], each element a JPEG, PNG or WebP file (base64 in JSON, raw in binary), or UINT8
[n, height, width, 3]. Outputs, each [n]: label, probability, task, score, margin, unknown, pool_version.
"""

import base64
import binascii
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Final

import numpy as np
from PIL import Image

from mqmk.deploy.serving.answer import AnswerBody
from mqmk.deploy.serving.errors import BadRequestError, TooLargeError
from mqmk.deploy.serving.inference import ImageLoader

MODEL: Final = "mqmk"
INPUT: Final = {"name": "image", "datatype": "BYTES", "shape": [-1]}
HEADER_LENGTH: Final = "Inference-Header-Content-Length"
_TEXT: Final = 128  # characters; ids are kept for feedback, so long ones would fill the memory


@dataclass(frozen=True)
class _Output:
    datatype: str
    value: Callable[[AnswerBody], Any]


_OUTPUTS: Final = {
    "label": _Output("BYTES", lambda answer: answer.label),
    "probability": _Output("FP32", lambda answer: answer.probability),
    "task": _Output("BYTES", lambda answer: answer.task),
    "score": _Output("FP32", lambda answer: answer.match.score),
    "margin": _Output("FP32", lambda answer: _margin(answer)),
    "unknown": _Output("BOOL", lambda answer: bool(answer.match.unknown)),
    "pool_version": _Output("INT64", lambda answer: answer.pool_version),
}
OUTPUTS: Final = [{"name": name, "datatype": row.datatype, "shape": [-1]} for name, row in _OUTPUTS.items()]


@dataclass(frozen=True)
class InferRequest:
    """A parsed request."""

    id: str | None
    images: tuple[ImageLoader, ...]
    outputs: tuple[tuple[str, bool], ...]
    """Names, and whether each is returned as binary."""
    matcher: str | None


@dataclass(frozen=True)
class InferResponse:
    """A body; `header_length` is the length of its JSON part when binary tensors follow it."""

    body: bytes
    header_length: int | None


def parse_infer(
    body: bytes, header_length: str | None, from_bytes: Callable[[bytes], ImageLoader], pixels: int
) -> InferRequest:
    """Parse a request; BadRequestError says what was expected."""
    head, binary = _split(body, header_length)
    try:
        fields = json.loads(head)
        if not isinstance(fields, dict) or not isinstance(fields.get("inputs"), list):
            raise BadRequestError('expected a JSON object with a list `inputs`: {"inputs": [{"name": "image", …}]}')
        inputs, parameters = fields["inputs"], fields.get("parameters") or {}
        if len(inputs) != 1 or not isinstance(inputs[0], dict) or inputs[0].get("name") != "image":
            raise BadRequestError('expected one input, named "image"')
        images = _parse_images(inputs[0], binary, from_bytes, pixels)
        outputs = tuple(_parse_outputs(fields.get("outputs"), bool(parameters.get("binary_data_output", False))))
        request_id, matcher = fields.get("id"), parameters.get("matcher")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        raise BadRequestError(f"not a v2 inference request: {_reason(error)}") from error
    if not all(value is None or (isinstance(value, str) and len(value) <= _TEXT) for value in (request_id, matcher)):
        raise BadRequestError(f"id and parameters.matcher: expected strings of at most {_TEXT} characters")
    return InferRequest(request_id or None, images, outputs, matcher)


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else f"a value has the wrong type: {error}"


def render_infer(request: InferRequest, request_id: str, answers: Sequence[AnswerBody]) -> InferResponse:
    """The answers as tensors, binary ones after the JSON and in its order."""
    outputs, tail = [], []
    for name, binary in request.outputs:
        kind = _OUTPUTS[name]
        values = [kind.value(answer) for answer in answers]
        output: dict[str, Any] = {"name": name, "datatype": kind.datatype, "shape": [len(values)]}
        if binary:
            tail.append(_encode(kind.datatype, values))
            output["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            output["data"] = values
        outputs.append(output)
    version = str(answers[0].pool_version)
    fields = {"model_name": MODEL, "model_version": version, "id": request_id, "outputs": outputs}
    head = json.dumps(fields).encode()
    return InferResponse(head + b"".join(tail), len(head) if tail else None)


def _split(body: bytes, header_length: str | None) -> tuple[bytes, bytes]:
    if header_length is None:
        return body, b""
    number = header_length.isascii() and header_length.isdigit() and len(header_length) <= 12
    if not number or int(header_length) > len(body):
        raise BadRequestError(f"{HEADER_LENGTH}: expected a number up to {len(body)}, got {header_length[:20]!r}")
    return body[: int(header_length)], body[int(header_length) :]


def _parse_images(
    tensor: dict[str, Any], binary: bytes, from_bytes: Callable[[bytes], ImageLoader], pixels: int
) -> tuple[ImageLoader, ...]:
    shape, kind = tensor["shape"], tensor["datatype"]
    if not all(type(size) is int and size >= 1 for size in shape):
        raise BadRequestError(f"shape: expected positive integers, got {str(shape)[:100]}")
    raw = None
    if (size := (tensor.get("parameters") or {}).get("binary_data_size")) is not None:
        if size != len(binary):
            raise BadRequestError(f"binary_data_size: expected {len(binary)}, the bytes after the JSON, got {size}")
        raw = binary
    if kind == "BYTES" and prod(shape) == max(shape):
        found = _decode_base64(tensor["data"]) if raw is None else _unpack(raw)
        if len(found) != prod(shape):
            raise BadRequestError(f"expected {prod(shape)} elements according to the shape, got {len(found)}")
        return tuple(from_bytes(element) for element in found)
    if kind == "UINT8" and len(shape) == 4 and shape[3] == 3:
        return _load_arrays(shape, tensor["data"] if raw is None else raw, pixels)
    raise BadRequestError(f"expected image as BYTES [n] or UINT8 [n, height, width, 3], got {kind} {str(shape)[:100]}")


def _decode_base64(data: Any) -> list[bytes]:
    elements = [element for row in data for element in (row if isinstance(row, list) else [row])]
    try:
        return [base64.b64decode(element, validate=True) for element in elements]
    except (binascii.Error, ValueError) as error:
        raise BadRequestError("expected base64 for the elements of a BYTES tensor in JSON") from error


def _unpack(raw: bytes) -> list[bytes]:
    """Elements, each preceded by its length as four little-endian bytes."""
    elements, place = [], 0
    while place < len(raw):
        if place + 4 > len(raw):
            raise BadRequestError("a BYTES tensor is truncated inside a length")
        (size,) = struct.unpack_from("<I", raw, place)
        if place + 4 + size > len(raw):
            raise BadRequestError("a BYTES tensor is truncated inside an element")
        elements.append(raw[place + 4 : place + 4 + size])
        place += 4 + size
    return elements


def _load_arrays(shape: Sequence[int], data: Any, pixels: int) -> tuple[ImageLoader, ...]:
    if shape[1] * shape[2] > pixels:
        raise TooLargeError(f"expected at most {pixels:,} pixels, got {shape[2]} x {shape[1]}")
    values = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else np.array(data, dtype=np.uint8)
    if values.size != prod(shape):
        raise BadRequestError(f"expected {prod(shape)} values according to the shape, got {values.size}")
    return tuple(partial(Image.fromarray, image) for image in values.reshape(shape))


def _parse_outputs(outputs: Any, binary: bool) -> list[tuple[str, bool]]:
    if not outputs:
        return [(name, binary) for name in _OUTPUTS]
    wanted = [(row["name"], bool((row.get("parameters") or {}).get("binary_data", binary))) for row in outputs]
    if unknown := [name for name, _ in wanted if name not in _OUTPUTS]:
        raise BadRequestError(f"unknown output {str(unknown[0])[:50]!r}; choose from {', '.join(_OUTPUTS)}")
    return wanted


def _encode(datatype: str, values: Sequence[Any]) -> bytes:
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(text)) + text for text in (value.encode() for value in values))
    return np.array(values, dtype={"FP32": "<f4", "BOOL": "?", "INT64": "<i8"}[datatype]).tobytes()


def _margin(answer: AnswerBody) -> float:
    """The lead over the runner-up; the score itself if there is only one task."""
    margin = answer.match.margin
    return answer.match.score if margin is None else margin
