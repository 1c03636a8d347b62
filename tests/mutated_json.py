"""How is a JSON document changed so that it stays JSON, or nearly: other types, huge numbers, nesting, odd text."""

import json
from dataclasses import dataclass
from typing import Any, Final

from mutated_bytes import Dice, damaged

DEPTHS: Final = (5, 200, 900, 970, 990, 1100, 20_000)  # around and beyond Python's limit of recursion


@dataclass(frozen=True)
class Raw:
    """Text that stands in the document as it is."""

    text: str


ODD: Final = (
    "null", "true", "false", "0", "-1", "1", "2", "1.5", "-0.0", "1e400", "-1e400", "1e-400", "NaN", "Infinity",
    "-Infinity", '""', '" "', '"\\u0000"', '"\\ud800"', '"\\udfff\\ud800"', '"\\u202e"', '"../../etc/passwd"', '"a/b"',
    '"pipe:id"', '"\\\\"', '"CON"', '"\\u00e9"', '"e\\u0301"', '"' + "x" * 201 + '"', '"' + "x" * 100_000 + '"', "[]",
    "{}", "[[]]", "[null]", '{"a": 1}', '{"": ""}', "9" * 18, "9" * 19, "9" * 400, "9" * 4300, "9" * 4400,
    "-" + "9" * 400,
    "0." + "1" * 5000, "1" + "0" * 308, "2147483648", "9223372036854775808", "1e5", "1E2", "00", "0x10", "'a'", "",
)  # fmt: skip
"""Values that somebody did not expect, as text: some are not JSON."""


def changed(document: Any, dice: Dice) -> bytes:
    """The document with one to three values or names changed; sometimes its bytes, too."""
    for _ in range(dice.choice((1, 1, 2, 3))):
        document = _somewhere(document, dice)
    data = _text(document, dice).encode("utf-8", "surrogatepass")
    return damaged(data, dice) if dice.random() < 0.1 else data


def _somewhere(node: Any, dice: Dice) -> Any:
    """Go down by chance, and change what is there."""
    if isinstance(node, dict) and node and dice.random() < 0.85:
        name = dice.choice(list(node))
        return {**node, name: _somewhere(node[name], dice)}
    if isinstance(node, list) and node and dice.random() < 0.85:
        place = dice.randrange(len(node))
        return [*node[:place], _somewhere(node[place], dice), *node[place + 1 :]]
    return _another(node, dice)


def _another(node: Any, dice: Dice) -> Any:
    chance = dice.random()
    if chance < 0.12:
        return _nested(dice)
    if chance < 0.22 and isinstance(node, dict):
        return _other_names(node, dice)
    if chance < 0.32 and isinstance(node, list):
        return node * dice.choice((0, 2, 50))
    if chance < 0.45 and isinstance(node, int | float):
        return Raw(str(node + dice.choice((-1, 1, 0.5, 10**9, 10**15))))
    if chance < 0.55 and isinstance(node, str):
        return node + dice.choice((" ", "\n", "\0", "/", ".tar", "\ud800", "‮", "́", "x" * 300)) or node[1:]
    return Raw(dice.choice(ODD))


def _nested(dice: Dice) -> Raw:
    deep = dice.choice(DEPTHS)
    opening, closing = dice.choice((("[", "]"), ('{"a":', "}"), ('[{"label":', "}]")))
    return Raw(opening * deep + "1" + closing * (deep if dice.random() < 0.8 else dice.randrange(deep)))


def _other_names(node: dict[str, Any], dice: Dice) -> dict[str, Any]:
    """A field less, one more, or one by another name."""
    names = list(node)
    less = {name: value for name, value in node.items() if name != dice.choice(names or [""])}
    more = {**node, dice.choice(("schema", "label", "name", "__proto__", "", "\ud800", "x" * 1000)): 1}
    return dice.choice((less, more, {name.upper(): value for name, value in node.items()}))


def _text(node: Any, dice: Dice) -> str:
    """As json.dumps writes it, but with raw text, and now and then a name twice."""
    if isinstance(node, Raw):
        return node.text
    if isinstance(node, list):
        return "[" + ",".join(_text(each, dice) for each in node) + "]"
    if isinstance(node, dict):
        rows = [f"{json.dumps(name)}:{_text(value, dice)}" for name, value in node.items()]
        if rows and dice.random() < 0.03:
            rows.append(dice.choice(rows))
        return "{" + ",".join(rows) + "}"
    return json.dumps(node)
