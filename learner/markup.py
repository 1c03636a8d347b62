"""How pieces of HTML and SVG are put together so that a class name can never become markup."""

from html import escape


class Markup(str):
    """Text that is markup already; any other string is escaped when it is put into a tag."""

    __slots__ = ()


Content = str | int | None
_VOID = ("img", "meta", "br")


def join(*parts: Content) -> Markup:
    """Parts one after another; those that are not markup are escaped."""
    return Markup(
        "".join(part if isinstance(part, Markup) else escape(str(part)) for part in parts if part is not None)
    )


def tag(name: str, /, *content: Content, **attributes: str | int | float | None) -> Markup:
    """An element. `class_` gives `class`, `stroke_width` gives `stroke-width`; None and False leave one out.

    >>> tag("td", "a < b", class_="name")
    '<td class="name">a &lt; b</td>'
    """
    shown = [
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(_number(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    ]
    opening = f"<{name}{''.join(shown)}>"
    return Markup(opening if name in _VOID else f"{opening}{join(*content)}</{name}>")


def table(header: Markup, rows: list[Markup], footer: Markup | None = None, class_: str | None = None) -> Markup:
    """A table that scrolls by itself where the screen is narrower."""
    parts = (tag("thead", header), tag("tbody", *rows), tag("tfoot", footer) if footer else None)
    return tag("div", tag("table", *parts, class_=class_), class_="scroll", tabindex="0")


def cells(name: str, *values: Content) -> Markup:
    """A table row: its first cell names it."""
    first = tag("th", values[0], scope="col" if name == "th" else "row")
    return tag("tr", first, *(tag(name, value, scope="col" if name == "th" else None) for value in values[1:]))


def _number(value: str | int | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
