"""How charts are put together from SVG elements so that a class name can never become markup."""

from html import escape

from markupsafe import Markup

Content = str | int | None


def join(*parts: Content) -> Markup:
    """Parts one after another; those that are not markup are escaped."""
    return Markup(
        "".join(part if isinstance(part, Markup) else escape(str(part)) for part in parts if part is not None)
    )


def tag(name: str, /, *content: Content, **attributes: str | int | float | None) -> Markup:
    """An element. `class_` gives `class`, `stroke_width` gives `stroke-width`; None and False leave one out.

    >>> print(tag("text", "a < b", class_="name"))
    <text class="name">a &lt; b</text>
    """
    shown = [
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(_number(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    ]
    return Markup(f"<{name}{''.join(shown)}>{join(*content)}</{name}>")


def _number(value: str | int | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
