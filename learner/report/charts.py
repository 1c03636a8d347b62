"""The charts of a report as SVG: lines after each task, the confusion of tasks, a map of queries.

Colours are CSS variables of the page (`templates/report.css`), so that they change with light and dark.
"""

from collections.abc import Mapping, Sequence
from math import floor, isfinite

from jaxtyping import Float, Int
from markupsafe import Markup
from torch import Tensor

from mqmk.learner.report.markup import join, tag

LINE_COLOURS = 8
_CORNERS = (  # of the marks that are not circles, in radii: colour alone is not accessible
    ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    ((0.0, -1.2), (1.2, 0.9), (-1.2, 0.9)),
    ((0.0, -1.3), (1.2, 0.0), (0.0, 1.3), (-1.2, 0.0)),
)


def line_chart(
    title: str,
    lines: Mapping[str, Sequence[float]],
    colours: Mapping[str, int],
    across: str = "tasks learned",
    places: Sequence[int | str] | None = None,
) -> Markup:
    """Rates from 0 to 1, one line for each name, labelled at its end; `places` are the numbers below, 1, 2, 3, ..."""
    right = max(78, 16 + 7 * max(map(len, lines), default=0))  # as wide as the longest name
    width, height, left, top, bottom = 420, 280, 44, 12, 36
    steps = max(len(values) for values in lines.values())
    numbers = places or range(1, steps + 1)
    least = min((v for values in lines.values() for v in values), default=0.0)
    floor_at = min(0.9, max(0, floor(least * 10)) / 10)

    def x(step: int) -> float:
        return left + (width - left - right) * (step / (steps - 1) if steps > 1 else 0.5)

    def y(rate: float) -> float:
        return top + (height - top - bottom) * (1 - rate) / (1 - floor_at)

    marks = [_grid_line(y(tenth / 10), f"{tenth * 10} %", left, width - right) for tenth in _ticks(floor_at)]
    every = -(-steps // 10)
    marks += [
        tag("text", str(numbers[step]), x=x(step), y=height - bottom + 16, text_anchor="middle")
        for step in range(0, steps, every)
    ]
    marks.append(tag("text", across, x=(left + width - right) / 2, y=height - 3, text_anchor="middle"))
    ends = _spread_labels({name: y(values[-1]) for name, values in lines.items()}, gap=13, lowest=height - bottom + 4)
    for name, values in lines.items():
        spots = [(x(step), y(value)) for step, value in enumerate(values)]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in spots)
        dots = [
            tag("path", tag("title", f"{name}, {across} {number}: {value:.1%}"), d=_dot(colours[name], *spot, 3.2))
            for number, spot, value in zip(numbers, spots, values, strict=True)
        ]
        label = tag("text", name, x=width - right + 10, y=ends[name] + 4, class_="end")
        dashed = "5 4" if name == "perfect" else None
        line = tag("path", d=path, class_="line", stroke_dasharray=dashed)
        marks.append(tag("g", line, *dots, label, class_=f"c{colours[name] % LINE_COLOURS}"))
    return _figure(title, tag("svg", *marks, viewBox=f"0 0 {width} {height}", role="img", aria_label=title))


def heat_map(title: str, names: Sequence[str], counts: Sequence[Sequence[int]]) -> Markup:
    """True tasks down, matched tasks across, in per cent of a row; the diagonal is what should be full."""
    cell = 44 if len(names) <= 8 else 32
    label, top = 116, 38
    size = cell * len(names)
    marks = [tag("text", "matched task", x=label + size / 2, y=12, text_anchor="middle")]
    for row, (name, found) in enumerate(zip(names, counts, strict=True)):
        y, total = top + row * cell, sum(found)
        marks.append(tag("text", str(row + 1), x=label + (row + 0.5) * cell, y=top - 8, text_anchor="middle"))
        shown = tag("title", name)
        text = f"{row + 1}  {_short(name, 13)}"
        marks.append(tag("text", shown, text, x=label - 8, y=y + cell / 2 + 4, text_anchor="end"))
        marks.append(tag("rect", x=label + 1, y=y + 1, width=size - 2, height=cell - 2, rx=3, class_="cell"))
        place = {"y": y + 1, "width": cell - 2, "height": cell - 2, "rx": 3}
        for column, count in enumerate(found):
            if count:
                hint = f"{name}, matched to {names[column]}: {count} of {total} images"
                marks.append(_cell(hint, label + column * cell, place, count / total, row == column))
    width, height = label + size + 2, top + size + 2
    svg = tag("svg", *marks, width=width, height=height, viewBox=f"0 0 {width} {height}", role="img", aria_label=title)
    return _figure(title, tag("div", svg, class_="scroll", tabindex="0"))


def _cell(hint: str, x: int, place: Mapping[str, int], share: float, is_own: bool) -> Markup:
    fill = tag("rect", x=x + 1, class_="hit" if is_own else "miss", fill_opacity=share, **place)
    middle = {"x": x + place["width"] / 2 + 1, "y": place["y"] + place["height"] / 2 + 4}
    number = tag("text", f"{100 * share:.0f}", class_="number strong" if share > 0.6 else "number", **middle)
    return tag("g", tag("title", hint), fill, number)


def scatter(
    title: str,
    places: Float[Tensor, "points 2"],
    task: Int[Tensor, " points"],
    names: Sequence[str],
    shapes: Sequence[int] | None = None,
) -> Markup:
    """Points on a plane, coloured by task, or by class with the shape of its task; a group's number stands where the
    middle of its points is."""
    size, margin = 420, 14
    low, high = places.amin(dim=0), places.amax(dim=0)
    at = margin + (places - low) / (high - low).clamp(min=1e-9) * (size - 2 * margin)
    groups, numbers = [], []
    for number, name in enumerate(names):
        own = at[task == number]
        if len(own):
            shape = number if shapes is None else shapes[number]
            spots = "".join(_dot(shape, x, y, 3.4) for x, y in own.tolist())
            groups.append(tag("path", tag("title", name), d=spots, style=task_colour(number, len(names))))
            x, y = own.median(dim=0).values.tolist()
            numbers.append(tag("text", str(number + 1), x=x, y=y + 4, text_anchor="middle", class_="centre"))
    svg = tag("svg", *groups, *numbers, viewBox=f"0 0 {size} {size}", role="img", aria_label=title, class_="map")
    return _figure(title, svg)


def task_legend(names: Sequence[str], shapes: Sequence[int] | None = None) -> Markup:
    """Which mark stands for which task or class."""
    entries = []
    for number, name in enumerate(names):
        shape = number if shapes is None else shapes[number]
        mark = tag("path", d=_dot(shape, 7.0, 7.0, 5.0), style=task_colour(number, len(names)))
        icon = tag("svg", mark, width=14, height=14, viewBox="0 0 14 14", aria_hidden="true")
        entries.append(tag("li", icon, f"{number + 1} {name}"))
    return tag("ul", *entries, class_="legend")


def task_colour(number: int, tasks: int) -> str:
    """Hues in the order of the tasks, all equally light."""
    return f"fill:oklch(var(--mark-light) 0.15 {(25 + 330 * number / max(1, tasks)) % 360:.0f})"


def bar(share: float) -> Markup:
    """A small horizontal bar for a table cell."""
    length = min(1.0, max(0.0, share)) * 100 if isfinite(share) else 0.0
    rect = tag("rect", width=length, height=8, rx=2, class_="hit")
    return tag("svg", rect, width=100, height=8, viewBox="0 0 100 8", aria_hidden="true")


def _dot(shape: int, x: float, y: float, r: float) -> str:
    """A mark as SVG path, so that all marks of a task are one element; shapes repeat after four."""
    kind = shape % (len(_CORNERS) + 1)
    if kind == len(_CORNERS):
        return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z"
    return "M" + "L".join(f"{x + r * dx:.1f} {y + r * dy:.1f}" for dx, dy in _CORNERS[kind]) + "z"


def _ticks(floor_at: float) -> list[int]:
    first = round(floor_at * 10)
    return [tenth for tenth in range(first, 11) if 10 - first <= 5 or (10 - tenth) % 2 == 0]


def _grid_line(y: float, text: str, left: int, right: int) -> Markup:
    line = tag("path", d=f"M{left} {y:.1f}H{right}", class_="grid")
    return join(line, tag("text", text, x=left - 6, y=y + 4, text_anchor="end"))


def _spread_labels(places: Mapping[str, float], gap: int, lowest: int) -> dict[str, float]:
    """The same places, moved so that labels do not lie upon each other."""
    order = sorted(places, key=lambda name: places[name])
    moved: dict[str, float] = {}
    previous = float(-gap)
    for name in order:
        previous = moved[name] = max(places[name], previous + gap)
    limit = float(max(lowest, gap * (len(order) - 1)))
    for name in reversed(order):
        moved[name] = min(moved[name], limit)
        limit = moved[name] - gap
    return moved


def _figure(title: str, image: Markup) -> Markup:
    return tag("figure", tag("figcaption", title), image)


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
