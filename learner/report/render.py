"""Fills in the HTML templates of reports: what a page says is in `templates/`, what it shows is computed in code."""

from functools import cache
from typing import Final

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from mqmk.learner.report.charts import bar

_SHARED: Final = "mqmk.learner.report"


def render(template: str, package: str = _SHARED, **values: object) -> str:
    """The page of a template in the package's folder `templates`; names are escaped, only Markup stands as it is."""
    return _environment(package).get_template(template).render(values)


def per_cent(value: float | None) -> str:
    """As tables show a rate; a dash where nothing was measured."""
    return "–" if value is None else f"{100 * value:.1f} %"


@cache
def _environment(package: str) -> Environment:
    """Every package can use the layout and the macros of this one."""
    loader = ChoiceLoader([PackageLoader(package), PackageLoader(_SHARED)])
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"bar": bar, "per_cent": per_cent}
    return found
