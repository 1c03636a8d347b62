"""docs/metrics.md, made from the declarations: `python -m mqmk.daemon.metrics_page > docs/metrics.md`."""

from collections.abc import Iterable
from typing import Final

from mqmk.daemon.metrics_declared import DAEMON_METRICS
from mqmk.deploy.metric_names import RAY_OWN_METRICS, RAY_PREFIX, REPLICA_METRICS, Metric

TABLE: Final = ("| metric | kind | labels | unit | what it says |", "|---|---|---|---|---|")
HEAD: Final = """\
# Metrics

<!-- Made by `python -m mqmk.daemon.metrics_page > docs/metrics.md`; a test compares. -->

How to collect and look at them is in [monitoring.md](monitoring.md).

Names begin with `mqmk_` and end with their unit; counters end with `_total`. A task label is the task's name for the
first `metrics.task_labels` tasks and `other` for the rest, so the number of series stays bounded. Whatever can be zero
is shown as zero from the start.

## The four matching rates

A match is right when the picture's true class belongs to the matched task. Four figures are called a matching rate, and
no name stands for two of them:

| kind | what | where it comes from |
|---|---|---|
| heldout | the true rate | held-out pictures of every task, after each version |
| labelled | the true rate of some traffic | `POST /feedback` |
| estimated | an estimate for all traffic | score and margin, by a calibration fitted on held-out pictures |
| agreement | the serving matcher against exact matching | a sample of traffic that is matched twice |

```
heldout    mqmk_heldout_task_matching_ratio
labelled   sum(rate(ray_mqmk_labelled_matches_total{result="matched"}[6h]))
           / sum(rate(ray_mqmk_labelled_matches_total[6h]))
estimated  sum(rate(ray_mqmk_estimated_matches_total[1h])) / sum(rate(ray_mqmk_estimated_answers_total[1h]))
agreement  sum(rate(ray_mqmk_agreement_answers_total{result="same"}[6h]))
           / sum(rate(ray_mqmk_agreement_answers_total[6h]))
```

How far the estimate may be off was measured when the version was built: the rate as a whole by
`mqmk_estimated_rate_error_ratio`, the probability of single answers by `mqmk_estimated_calibration_error_ratio`.
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD, "## Of the daemon", "", "At `metrics.host`:`metrics.port`, `/metrics`; also `process_*`.", ""]
    lines += _table(DAEMON_METRICS)
    lines += [
        "",
        "## Of the replicas",
        "",
        "At the port of Ray's metrics agent, with the labels `deployment`, `replica` and",
    ]
    lines += ["`application` besides their own.", "", *_table(REPLICA_METRICS, RAY_PREFIX)]
    lines += ["", "## Of Ray itself", "", "What the dashboards read of Ray's own metrics.", ""]
    lines += ["| metric | what it says |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, text in RAY_OWN_METRICS.items()]
    return "\n".join(lines) + "\n"


def _table(metrics: Iterable[Metric], prefix: str = "") -> list[str]:
    rows = [
        f"| `{prefix}{each.name}` | {each.kind} | {', '.join(each.labels)} | {each.unit} | {each.description} |"
        for each in metrics
    ]
    return [*TABLE, *rows]


if __name__ == "__main__":
    print(page(), end="")
