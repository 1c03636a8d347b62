"""The report's section of ablations: what one choice is worth, a small table for each."""

from typing import Final

from mqmk.learner.ablations import Ablations
from mqmk.learner.charts import bar
from mqmk.learner.markup import Markup, cells, join, table, tag

WORDS: Final = {
    "keys per task": "class keys of a task averaged into so many (exact matching)",
    "top-K": "how many of a task's largest cosines are summed (exact matching)",
    "classifier": "linear head, nearest class mean, class of the best key (exact matching)",
    "shortlist": "how many tasks of the cascade get an exact query",
}


def ablation_tables(found: Ablations) -> Markup:
    """One table for each choice, on the same trained pool."""
    about = "The same trained pool, used in another way; a bar shows the matching rate."
    return join(tag("p", about), tag("div", *(_one(choice, values) for choice, values in found.items()), class_="pair"))


def _one(choice: str, values: dict[str, dict[str, float]]) -> Markup:
    rows = [
        cells(
            "td",
            value,
            f"{100 * row['matching_rate']:.1f} %",
            f"{100 * row['accuracy_task']:.1f} %",
            f"{row['queries']:.1f}",
            bar(row["matching_rate"]),
        )
        for value, row in values.items()
    ]
    header = cells("th", choice, "matching rate", "accuracy", "queries", "")
    caption = tag("figcaption", join(choice, tag("small", f" {WORDS.get(choice, '')}")))
    return tag("figure", caption, table(header, rows, class_="ablation"))
