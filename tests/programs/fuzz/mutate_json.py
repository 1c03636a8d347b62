"""Mutate JSON documents, mostly into valid JSON: other types, huge numbers, deep nesting, odd text."""

import json
from dataclasses import dataclass
from typing import Any, Final

from programs.fuzz.mutate_bytes import Rng, mutate_bytes

DEPTHS: Final = (5, 200, 900, 970, 990, 1100, 20_000)  # around and beyond Python's recursion limit


@dataclass(frozen=True)
class Raw:
    """Text that is written into the document verbatim."""

    text: str


ODD_VALUES: Final = (
    "null", "true", "false", "0", "-1", "1", "2", "1.5", "-0.0", "1e400", "-1e400", "1e-400", "NaN", "Infinity",
    "-Infinity", '""', '" "', '"\\u0000"', '"\\ud800"', '"\\udfff\\ud800"', '"\\u202e"', '"../../etc/passwd"', '"a/b"',
    '"pipe:id"', '"\\\\"', '"CON"', '"\\u00e9"', '"e\\u0301"', '"' + "x" * 201 + '"', '"' + "x" * 100_000 + '"', "[]",
    "{}", "[[]]", "[null]", '{"a": 1}', '{"": ""}', "9" * 18, "9" * 19, "9" * 400, "9" * 4300, "9" * 4400,
    "-" + "9" * 400,
    "0." + "1" * 5000, "1" + "0" * 308, "2147483648", "9223372036854775808", "1e5", "1E2", "00", "0x10", "'a'", "",
)  # fmt: skip
"""Unexpected values, as text; some are not JSON."""


def mutate_json(document: Any, rng: Rng) -> bytes:
    """Change one to three values or names, and sometimes the encoded bytes as well."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        document = _mutate_at_random_depth(document, rng)
    data = _serialize(document, rng).encode("utf-8", "surrogatepass")
    return mutate_bytes(data, rng) if rng.random() < 0.1 else data


def _mutate_at_random_depth(node: Any, rng: Rng) -> Any:
    """Descend at random and replace what is found."""
    if isinstance(node, dict) and node and rng.random() < 0.85:
        name = rng.choice(list(node))
        return {**node, name: _mutate_at_random_depth(node[name], rng)}
    if isinstance(node, list) and node and rng.random() < 0.85:
        place = rng.randrange(len(node))
        return [*node[:place], _mutate_at_random_depth(node[place], rng), *node[place + 1 :]]
    return _replace_value(node, rng)


def _replace_value(node: Any, rng: Rng) -> Any:
    chance = rng.random()
    if chance < 0.12:
        return _nest_deeply(rng)
    if chance < 0.22 and isinstance(node, dict):
        return _mutate_names(node, rng)
    if chance < 0.32 and isinstance(node, list):
        return node * rng.choice((0, 2, 50))
    if chance < 0.45 and isinstance(node, int | float):
        return Raw(str(node + rng.choice((-1, 1, 0.5, 10**9, 10**15))))
    if chance < 0.55 and isinstance(node, str):
        return node + rng.choice((" ", "\n", "\0", "/", ".tar", "\ud800", "‮", "́", "x" * 300)) or node[1:]
    return Raw(rng.choice(ODD_VALUES))


def _nest_deeply(rng: Rng) -> Raw:
    deep = rng.choice(DEPTHS)
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"label":', "}]")))
    return Raw(opening * deep + "1" + closing * (deep if rng.random() < 0.8 else rng.randrange(deep)))


def _mutate_names(node: dict[str, Any], rng: Rng) -> dict[str, Any]:
    """Remove, add or rename a field."""
    names = list(node)
    less = {name: value for name, value in node.items() if name != rng.choice(names or [""])}
    more = {**node, rng.choice(("schema", "label", "name", "__proto__", "", "\ud800", "x" * 1000)): 1}
    return rng.choice((less, more, {name.upper(): value for name, value in node.items()}))


def _serialize(node: Any, rng: Rng) -> str:
    """Like json.dumps, but with raw text and an occasional duplicate name."""
    if isinstance(node, Raw):
        return node.text
    if isinstance(node, list):
        return "[" + ",".join(_serialize(each, rng) for each in node) + "]"
    if isinstance(node, dict):
        rows = [f"{json.dumps(name)}:{_serialize(value, rng)}" for name, value in node.items()]
        if rows and rng.random() < 0.03:
            rows.append(rng.choice(rows))
        return "{" + ",".join(rows) + "}"
    return json.dumps(node)
