"""What stands around the content of every report: one HTML file that loads nothing and needs no script."""

from importlib.resources import files
from typing import Final

from mqmk.learner.markup import Markup, tag

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, body: Markup) -> str:
    """The whole file."""
    style = Markup(files(__package__).joinpath("report.css").read_text(encoding="utf-8"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", f"MQMK: {title}"),
        tag("style", style),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', body), lang='en')}\n"


def section(name: str, title: str, content: Markup) -> tuple[str, str, Markup]:
    """A part that the links at the top lead to: its name, its title and the whole of it."""
    return name, title, tag("section", tag("h2", title), content, id=name)


def tiles(figures: dict[str, str]) -> Markup:
    """The few numbers that come first."""
    return tag("dl", *(tag("div", tag("dt", key), tag("dd", value)) for key, value in figures.items()), class_="tiles")


def per_cent(value: float) -> str:
    """As tables show a rate."""
    return f"{100 * value:.1f} %"
