"""Is it fine? The dashboard to begin with."""

from typing import Final

from mqmk.deploy.dashboard_panels import (
    AGREEMENT,
    ERRORS,
    ESTIMATED,
    LABELLED,
    PREDICTIONS,
    SERVING_RATE,
    UNKNOWN,
    Board,
    Panel,
    Query,
    Row,
    number,
    quantile,
)

OVERVIEW: Final = Board(
    "mqmk-overview",
    "MQMK: is it fine?",
    "Everything at a glance. Green everywhere: nothing to do.",
    (
        Row(
            "Is it fine?",
            (
                number(
                    "Parts that work",
                    "Dependencies of the daemon that work: bucket, Ray, MLflow, disk, state. 100 % is fine; the "
                    "system dashboard says which one does not.",
                    "avg(mqmk_dependency_up)",
                    "percentunit",
                    "high",
                    (1.0, 0.8),
                ),
                number(
                    "Replicas ready",
                    "Replicas that take requests, of those that are wanted.",
                    "sum(mqmk_replicas_ready) / clamp_min(sum(mqmk_replicas_configured), 1)",
                    "percentunit",
                    "high",
                    (1.0, 0.5),
                ),
                number(
                    "Waiting for a person",
                    "Tasks that are quarantined, in conflict or held: each goes on only when somebody acts. "
                    "`mqmk-daemon tasks` says what to type.",
                    "sum(mqmk_tasks_waiting_for_operator)",
                    "short",
                    "low",
                    (1.0, 5.0),
                ),
                number(
                    "Failed requests",
                    "Share of predictions answered with a server error (5xx).",
                    f"{ERRORS} or vector(0)",
                    "percentunit",
                    "low",
                    (0.001, 0.01),
                ),
                number(
                    "Slow answers (99 %)",
                    "99 of 100 predictions were answered within this time.",
                    quantile(0.99, 'ray_mqmk_request_seconds_bucket{stage="total"}'),
                    "s",
                    "low",
                    (0.5, 2.0),
                ),
                number(
                    "Alerts",
                    "Alerts of this project that fire now.",
                    'count(ALERTS{alertstate="firing",alertname=~"Mqmk.*"}) or vector(0)',
                    "short",
                    "low",
                    (1.0, 3.0),
                ),
            ),
        ),
        Row(
            "Does it match the right prompts?",
            (
                number(
                    "Matching, held-out",
                    "True matching rate on held-out pictures after the current version, mean over tasks.",
                    SERVING_RATE,
                    "percentunit",
                    "high",
                    (0.8, 0.6),
                ),
                number(
                    "Matching, labelled",
                    "Matching rate of answers whose true label came as feedback.",
                    LABELLED,
                    "percentunit",
                    "high",
                    (0.8, 0.6),
                ),
                number(
                    "Matching, estimated",
                    "Matching rate of all answers, estimated without labels from score and margin.",
                    ESTIMATED,
                    "percentunit",
                    "high",
                    (0.8, 0.6),
                ),
                number(
                    "Agreement with exact",
                    "Share of sampled answers that exact matching would have matched to the same task.",
                    AGREEMENT,
                    "percentunit",
                    "high",
                    (0.95, 0.85),
                ),
                number(
                    "Unknown pictures",
                    "Share of answers whose picture looks like nothing the pool knows; about 1 % is normal.",
                    UNKNOWN,
                    "percentunit",
                    "low",
                    (0.05, 0.2),
                ),
                number(
                    "Forgetting",
                    "Accuracy that tasks lost since they were learned, mean over tasks; 0 is perfect.",
                    "avg(mqmk_heldout_forgetting_ratio)",
                    "percentunit",
                    "low",
                    (0.05, 0.15),
                ),
            ),
        ),
        Row(
            "Is it learning?",
            (
                number(
                    "Pool version",
                    "The version that is current. It grows by one with each learned or forgotten task.",
                    "max(mqmk_pool_version)",
                ),
                number("Tasks served", "Tasks in the current version.", "max(mqmk_pool_tasks)"),
                number("Classes served", "Classes in the current version.", "max(mqmk_pool_classes)"),
                number(
                    "On their way",
                    "Tasks that were discovered and are neither served nor set aside.",
                    "sum(mqmk_backlog_tasks)",
                ),
                number(
                    "Oldest on its way",
                    "Age of the oldest of them.",
                    "max(mqmk_oldest_pending_seconds)",
                    "s",
                    "low",
                    (3600.0, 21600.0),
                ),
                number(
                    "Shard to served (median)",
                    "Half of the tasks of the last day were served within this time after they were "
                    "complete in the bucket.",
                    quantile(0.5, "mqmk_shard_to_served_seconds_bucket", window="1d"),
                    "s",
                ),
                Panel(
                    "Tasks by state",
                    "Where all tasks are. A growing band that is not SERVING is work that piles up.",
                    "bars",
                    (Query("sum by (state) (mqmk_tasks)", "{{state}}"),),
                    width=12,
                ),
                Panel(
                    "Requests",
                    "Predictions a second by status code.",
                    "timeseries",
                    (
                        Query(
                            f"sum by (code) (rate(ray_mqmk_requests_total{{{PREDICTIONS}}}[$__rate_interval]))",
                            "{{code}}",
                        ),
                    ),
                    "reqps",
                    12,
                ),
            ),
        ),
    ),
)
