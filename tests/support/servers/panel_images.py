"""Images of the dashboards without Grafana: each panel drawn as SVG from Prometheus's results for its queries.

Plain drawings of the same data in the same places, for docs/monitoring.md; Grafana draws them better.
"""

import json
import math
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from support.servers.monitored import OPENER, ask, filled

from mqmk.deploy.grafana.generator.panels import Board, Panel, Query
from mqmk.learner.report.markup import Markup, join, tag

POINTS = 150
COLUMN, LINE, GAP = 58, 30, 6  # pixels of Grafana's grid
COLOURS = ("#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#8f8cd9", "#b7b7a4", "#d98c8c")
RED, YELLOW, GREEN, PURPLE = "#e24d42", "#eab839", "#73bf69", "#b877d9"
NAMED = {"red": RED, "yellow": YELLOW, "green": GREEN, "purple": PURPLE, "orange": "#ef843c",
         "light-blue": "#8ab8ff", "super-light-blue": "#c0d8ff"}  # fmt: skip
STYLE = Path(__file__).with_suffix(".css").read_text()

Points = list[tuple[float, float]]
"""Timestamps in seconds, and values."""


@dataclass(frozen=True)
class Line:
    """One series of a panel."""

    name: str
    points: Points
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Moments:
    """The time range of an image."""

    server: str
    begin: float
    end: float

    def lines(self, query: Query) -> list[Line]:
        """A range query over the window."""
        step = max(1, round((self.end - self.begin) / POINTS))
        asked = {"query": filled(query.expr), "start": self.begin, "end": self.end, "step": step}
        with OPENER.open(f"{self.server}/api/v1/query_range?{urllib.parse.urlencode(asked)}", timeout=20) as answer:
            found = json.loads(answer.read())["data"]["result"]
        every = [Line(named(query, each["metric"]), _numbers(each["values"]), each["metric"]) for each in found]
        return [line for line in every if line.points]

    def now(self, query: Query) -> list[Line]:
        """An instant query at the end of the window."""
        found = ask(self.server, filled(query.expr), self.end)
        every = [Line(named(query, each["metric"]), _numbers([each["value"]]), each["metric"]) for each in found]
        return [line for line in every if line.points]


def named(query: Query, labels: Mapping[str, str]) -> str:
    """A series by its legend."""
    if query.legend:
        return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), query.legend)
    return ", ".join(value for name, value in labels.items() if name != "__name__")


def _numbers(values: Sequence[tuple[float, str]]) -> Points:
    return [(float(at), float(value)) for at, value in values if math.isfinite(float(value))]


# Numbers as people read them


def shown(value: float, unit: str) -> str:
    """A number with its unit."""
    match unit:
        case "percentunit":
            return f"{value * 100:.3g} %"
        case "percent":
            return f"{value:.3g} %"
        case "s":
            return _seconds(value)
        case "bytes" | "Bps":
            return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB")) + ("/s" if unit == "Bps" else "")
        case "reqps" | "cps":
            return f"{value:.3g}/s"
    return _scaled(value, 1000, ("", "K", "M", "G")).strip()


def _seconds(value: float) -> str:
    if abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if abs(value) < 120 else f"{value / 60:.3g} min"


def _scaled(value: float, factor: int, names: Sequence[str]) -> str:
    place = 0
    while abs(value) >= factor and place < len(names) - 1:
        value, place = value / factor, place + 1
    return f"{value:.3g} {names[place]}"


def colour_of(panel: Panel, value: float) -> str:
    """By the panel's limits."""
    if panel.limits is None or panel.good == "none":
        return "#ccccdc"
    first, second = panel.limits
    if panel.good == "low":
        return GREEN if value < first else YELLOW if value < second else RED
    return GREEN if value >= first else YELLOW if value >= second else RED


# Panels


@dataclass(frozen=True)
class Frame:
    """Where a curve is drawn: a box of pixels, a time and a range of values."""

    width: float
    height: float
    moments: Moments
    least: float
    most: float
    left: float = 60.0
    bottom: float = 18.0

    def x(self, at: float) -> float:
        share = (at - self.moments.begin) / (self.moments.end - self.moments.begin)
        return self.left + share * (self.width - self.left - 8)

    def y(self, value: float) -> float:
        share = (value - self.least) / ((self.most - self.least) or 1.0)
        return 6 + (1 - share) * (self.height - self.bottom - 6)

    def axes(self, unit: str) -> list[Markup]:
        """Lines with numbers, and the minutes below."""
        marks = []
        for place in range(5):
            value = self.least + (self.most - self.least) * place / 4
            y = self.y(value)
            marks.append(tag("line", x1=self.left, x2=self.width - 8, y1=y, y2=y, stroke="#2b2e33"))
            marks.append(tag("text", shown(value, unit), x=self.left - 5, y=y + 3, text_anchor="end"))
        minutes = (self.moments.end - self.moments.begin) / 60
        every = max(1, round(minutes / 5))
        for minute in range(0, int(minutes) + 1, every):
            x = self.x(self.moments.begin + 60 * minute)
            marks.append(tag("text", f"{minute} min", x=x, y=self.height - 5, text_anchor="middle"))
        return marks


def _curves(panel: Panel, lines: Sequence[Line], moments: Moments, width: float, height: float) -> Markup:
    stacked = panel.look == "bars"
    drawn = _stacked(lines) if stacked else [(line, [0.0] * len(line.points)) for line in lines]
    tops = [value + low for line, lows in drawn for (_, value), low in zip(line.points, lows, strict=True)]
    rows = 1 + sum(len(line.name) + 5 for line in lines) // int(width / 6.2)
    frame = Frame(width, height - 13 * min(3, rows) - 2, moments, *_range(min(tops), max(tops)))
    marks = frame.axes(panel.unit) + versions(frame)
    for place, (line, lows) in enumerate(drawn):
        marks.append(_curve(frame, line, lows, COLOURS[place % len(COLOURS)], stacked))
    return join(tag("svg", *marks, width=width, height=frame.height), _legend(lines))


def _range(least: float, most: float) -> tuple[float, float]:
    """From zero or below to a value whose quarters are round numbers."""
    least, most = min(0.0, least), max(most, 0.0)
    span = (most - least) or 1.0
    power = 10 ** math.floor(math.log10(span))
    step = next(each * power for each in (1, 2, 4, 6, 8, 10) if each * power >= span * 0.999)
    return (0.0 if least > -step / 100 else -step), step


def _curve(frame: Frame, line: Line, lows: Sequence[float], colour: str, filled_in: bool) -> Markup:
    spots = [(frame.x(at), frame.y(value + low)) for (at, value), low in zip(line.points, lows, strict=True)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
    if len(spots) == 1:
        return tag("circle", cx=spots[0][0], cy=spots[0][1], r=2, fill=colour)
    if not filled_in:
        return tag("path", d=path, fill="none", stroke=colour, stroke_width=1.4)
    below = [(frame.x(at), frame.y(low)) for (at, _), low in zip(line.points, lows, strict=True)][::-1]
    return tag("path", d=path + "L" + "L".join(f"{x:.1f} {y:.1f}" for x, y in below) + "Z", fill=colour, opacity=0.7)


def _stacked(lines: Sequence[Line]) -> list[tuple[Line, list[float]]]:
    """Each line with what lies below it."""
    below: dict[float, float] = {}
    drawn = []
    for line in lines:
        drawn.append((line, [below.get(at, 0.0) for at, _ in line.points]))
        for at, value in line.points:
            below[at] = below.get(at, 0.0) + value
    return drawn


def versions(frame: Frame) -> list[Markup]:
    """A purple line where another version became current."""
    found = frame.moments.lines(Query("max(mqmk_pool_version)"))
    points = found[0].points if found else []
    moved = [at for (_, before), (at, after) in pairwise(points) if before != after]
    return [
        tag("line", x1=frame.x(at), x2=frame.x(at), y1=6, y2=frame.height - frame.bottom, stroke=PURPLE,
            stroke_dasharray="3 3")
        for at in moved
    ]  # fmt: skip


def _legend(lines: Sequence[Line]) -> Markup:
    names = [
        tag("span", tag("i", style=f"background:{COLOURS[place % len(COLOURS)]}"), line.name)
        for place, line in enumerate(lines)
    ]
    return tag("div", *names, class_="legend")


def _figures(panel: Panel, lines: Sequence[Line], *_: Any) -> Markup:
    figures = []
    for line in lines:
        value = line.points[-1][1]
        number = tag("div", shown(value, panel.unit), class_="big", style=f"color:{colour_of(panel, value)}")
        figures.append(tag("div", number, tag("div", line.name, class_="name") if len(lines) > 1 else None))
    return tag("div", *figures, class_="several" if len(lines) > 1 else "one")


def _table(panel: Panel, lines: Sequence[Line], _moments: Moments, _width: float, height: float) -> Markup:
    hidden = ("__name__", "instance", "job", "part")
    rows = sorted(lines, key=lambda line: -line.points[-1][1])[: int((height - 20) // 20)]
    names = [name for name in rows[0].labels if name not in hidden]
    head = tag("tr", *(tag("th", name) for name in (*names, "value")))
    cells = [
        tag("tr", *(tag("td", line.labels.get(name, "")) for name in names),
            tag("td", shown(line.points[-1][1], panel.unit)))
        for line in rows
    ]  # fmt: skip
    return tag("table", head, *cells)


def _matrix(_panel: Panel, lines: Sequence[Line], *_: Any) -> Markup:
    cells = {(line.labels["true_task"], line.labels["matched_task"]): line.points[-1][1] for line in lines}
    columns = list(dict.fromkeys(true for true, _ in cells)) + (
        ["other"] if any(m == "other" for _, m in cells) else []
    )
    most = max(cells.values())
    rows = []
    for true in dict.fromkeys(true for true, _ in cells):
        values = [cells.get((true, column), 0.0) for column in columns]
        shades = [f"background:rgba(87,148,242,{0.05 + 0.95 * value / most:.2f})" for value in values]
        told = [tag("td", f"{v:g}", class_="cell", style=shade) for v, shade in zip(values, shades, strict=True)]
        rows.append(tag("tr", tag("th", true), *told))
    return tag("table", tag("tr", tag("th", "true \\ matched"), *(tag("th", name) for name in columns)), *rows)


def _heatmap(panel: Panel, lines: Sequence[Line], moments: Moments, width: float, height: float) -> Markup:
    """Buckets count what is at most their bound: the difference to the one below is what lies between."""
    ordered = sorted(lines, key=lambda line: float(line.labels["le"].replace("+Inf", "inf")))
    frame, below, rects = Frame(width, height, moments, 0, len(ordered)), dict[float, float](), list[Markup]()
    step = (moments.end - moments.begin) / POINTS
    counts = []
    for place, line in enumerate(ordered):
        for at, value in line.points:
            counts.append((place, at, max(0.0, value - below.get(at, 0.0))))
            below[at] = value
    most = max(count for *_, count in counts) or 1.0
    for place, at, count in counts:
        if count > most / 200:
            box = {"x": frame.x(at), "y": frame.y(place + 1), "width": frame.x(at + step) - frame.x(at) + 0.5}
            shade = 0.15 + 0.85 * count / most
            rects.append(tag("rect", **box, height=frame.y(0) - frame.y(1), fill="#f2995c", opacity=round(shade, 2)))
    every = -(-len(ordered) // 8)
    for place, line in enumerate(ordered):
        if place % every == 0:
            name = line.labels["le"] if line.labels["le"] == "+Inf" else shown(float(line.labels["le"]), panel.unit)
            rects.append(tag("text", name, x=frame.left - 5, y=frame.y(place + 0.5) + 3, text_anchor="end"))
    return tag("svg", *frame.axes("")[10:], *rects, width=width, height=height)


def _states(panel: Panel, lines: Sequence[Line], moments: Moments, width: float, height: float) -> Markup:
    """A bar for each series, with a new colour where its value changes."""
    left, row = 110.0, min(26.0, (height - 24) / len(lines))
    frame = Frame(width, height, moments, 0, 1, left=left)
    values = sorted({value for line in lines for _, value in line.points})
    marks = frame.axes("")[10:]
    for place, line in enumerate(lines):
        marks.append(tag("text", line.name[-18:], x=left - 5, y=10 + place * row + row / 2, text_anchor="end"))
        for begin, end, value in _runs(line.points, moments.end):
            x, right = frame.x(begin), frame.x(end)
            usual = (f"{value:g}", COLOURS[values.index(value) % len(COLOURS)])
            word, colour = panel.words.get(int(value), usual)
            colour = NAMED.get(colour, colour)
            marks.append(tag("rect", x=x, width=max(1.0, right - x), y=6 + place * row, height=row - 3, fill=colour))
            if right - x > 7 * len(word):
                text = tag("text", word, x=x + 3, y=10 + place * row + row / 2, style="fill:#111217")
                marks.append(text)
    return tag("svg", *marks, width=width, height=height)


def _runs(points: Points, end: float) -> list[tuple[float, float, float]]:
    """Intervals of constant value."""
    runs: list[tuple[float, float, float]] = []
    for (at, value), following in zip(points, [*(at for at, _ in points[1:]), end], strict=True):
        if runs and runs[-1][2] == value:
            runs[-1] = (runs[-1][0], following, value)
        else:
            runs.append((at, following, value))
    return runs


Drawer = Callable[[Panel, Sequence[Line], Moments, float, float], Markup]
DRAWERS: dict[str, Drawer] = {
    "stat": _figures, "timeseries": _curves, "bars": _curves, "table": _table, "matrix": _matrix,
    "heatmap": _heatmap, "states": _states,
}  # fmt: skip


def _panel(panel: Panel, moments: Moments, x: int, y: int) -> Markup:
    width, height = panel.width * COLUMN - GAP, panel.height * LINE - GAP
    seen = moments.now if panel.look in ("stat", "table", "matrix") else moments.lines
    lines = [line for query in panel.queries for line in seen(query)]
    nothing = tag("div", "no data", class_="none")
    inside = DRAWERS[panel.look](panel, lines, moments, width - 2, height - 26) if lines else nothing
    place = f"left:{x * COLUMN}px;top:{y * LINE}px;width:{width}px;height:{height}px"
    return tag("section", tag("h2", panel.title), inside, style=place)


def page(board: Board, moments: Moments) -> Markup:
    """A dashboard as one page, its panels where Grafana puts them."""
    parts, y = list[Markup](), 0
    for row in board.rows:
        parts.append(tag("h3", row.title, style=f"top:{y * LINE}px;left:2px"))
        y, x, tallest = y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > 24:
                y, x, tallest = y + tallest, 0, 0
            parts.append(_panel(panel, moments, x, y))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    main = tag("main", *parts, style=f"width:{24 * COLUMN}px;height:{y * LINE}px")
    return join(
        Markup("<!doctype html><meta charset=utf-8>"), tag("style", Markup(STYLE)), tag("h1", board.title), main
    )


def photograph(pages: Mapping[str, Markup], folder: Path) -> None:
    """Each page as a PNG with few colours."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=flags)
        for name, markup in pages.items():
            opened = browser.new_page(viewport={"width": 24 * COLUMN + 20, "height": 400})
            opened.set_content(markup)
            path = folder / f"{name}.png"
            opened.screenshot(path=path, full_page=True)
            Image.open(path).quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
        browser.close()
