"""Which matchers exist, what they do and what they need: the one list that every other list of matchers derives from.

No heavy imports: the command line and the configuration read it. The functions themselves are in matchers.py.
"""

from dataclasses import dataclass
from typing import Final, Literal

AUTO: Final = "auto"
"""The matcher with the best accuracy on held-out images within the budget (`predictor.choose_matcher`)."""

Need = Literal["nothing", "plain means", "statistics", "true task"]
"""What a matcher needs beyond prompts and keys: class means of queries without prompts (`train.plain_means`), the
anchor prompt and every task's statistics of its query (`train.anchor_steps`), or the true task of each image
(evaluation only)."""


@dataclass(frozen=True)
class MatcherInfo:
    """One matcher, for people and for everything that offers a choice."""

    name: str
    description: str
    needs: Need = "nothing"

    @property
    def is_servable(self) -> bool:
        """Whether a service can answer with it: pools of the daemon hold what it needs."""
        return self.needs != "true task"

    @property
    def uses_plain_query(self) -> bool:
        """Whether it matches by the query of the ViT without prompts, a whole pass that shares nothing."""
        return self.needs == "plain means"


MATCHER_INFO: Final = {
    info.name: info
    for info in (
        MatcherInfo("sqsk", "one query without prompts, one key for a task", "plain means"),
        MatcherInfo("sqmk", "one query without prompts, one key for a class", "plain means"),
        MatcherInfo("mqsk", "a query for every task, one key for a task"),
        MatcherInfo("mqmk", "a query for every task, one key for a class: exact matching"),
        MatcherInfo("mqmk-ei", "one query with the mean of all prompts, one key for a class"),
        MatcherInfo("cascade", "the cheap query of mqmk-ei draws up a shortlist, exact queries decide"),
        MatcherInfo("anchor", "one query with the anchor prompt, a regression over all classes", "statistics"),
        MatcherInfo("fused", "the anchor draws up a shortlist, exact queries are weighed with it", "statistics"),
        MatcherInfo("perfect", "the true task is given: an upper bound, not a method", "true task"),
    )
}
SERVABLE_MATCHERS: Final = tuple(info.name for info in MATCHER_INFO.values() if info.is_servable)
PLAIN_MATCHERS: Final = frozenset(info.name for info in MATCHER_INFO.values() if info.needs == "plain means")
CLASS_MATCHERS: Final = frozenset(info.name for info in MATCHER_INFO.values() if info.needs == "statistics")
"""Those that weigh all classes themselves: the matched task is that of the best class, and no classifier is asked."""
EXACT: Final = "mqmk"
"""The matcher that approximates nothing; others are measured by how often they agree with it."""
