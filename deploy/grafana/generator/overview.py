"""Overview: health, matching and learning at a glance. The dashboard to start with."""

from typing import Final

from mqmk.deploy.grafana.generator.panels import (
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
    "MQMK: overview",
    "Health, matching and learning at a glance. All green: nothing to do.",
    (
        Row(
            "Health",
            (
                number(
                    "Dependencies up",
                    "Share of the daemon's dependencies that work, such as bucket, Ray, MLflow, disk. If below 100 %, "
                    "the system dashboard shows which one is down.",
                    "avg(mqmk_dependency_up)",
                    "percentunit",
                    "high",
                    (1.0, 0.8),
                ),
                number(
                    "Replicas ready",
                    "Replicas that take requests, as a share of those configured.",
                    "sum(mqmk_replicas_ready) / clamp_min(sum(mqmk_replicas_configured), 1)",
                    "percentunit",
                    "high",
                    (1.0, 0.5),
                ),
                number(
                    "Needs attention",
                    "Tasks that are quarantined, in conflict or held: each waits for an operator. "
                    "`mqmk-daemon tasks` shows which command to run.",
                    "sum(mqmk_tasks_waiting_for_operator)",
                    "short",
                    "low",
                    (1.0, 5.0),
                ),
                number(
                    "Error rate",
                    "Share of predictions answered with a server error (5xx).",
                    f"{ERRORS} or vector(0)",
                    "percentunit",
                    "low",
                    (0.001, 0.01),
                ),
                number(
                    "Latency (p99)",
                    "99 % of predictions were answered within this time.",
                    quantile(0.99, 'ray_mqmk_request_duration_seconds_bucket{stage="total"}'),
                    "s",
                    "low",
                    (0.5, 2.0),
                ),
                number(
                    "Firing alerts",
                    "Alerts of this project that are firing.",
                    'count(ALERTS{alertstate="firing",alertname=~"Mqmk.*"}) or vector(0)',
                    "short",
                    "low",
                    (1.0, 3.0),
                ),
            ),
        ),
        Row(
            "Matching",
            (
                number(
                    "Matching, held-out",
                    "True matching rate of the current version on held-out images, mean over tasks.",
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
                    "Agreement with exact matching",
                    "Share of sampled answers that exact matching would have matched to the same task.",
                    AGREEMENT,
                    "percentunit",
                    "high",
                    (0.95, 0.85),
                ),
                number(
                    "Unknown images",
                    "Share of answers whose image looks like nothing the pool knows; about 1 % is normal.",
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
            "Learning",
            (
                number(
                    "Pool version",
                    "The current version. Learning and forgetting increase it, a rollback lowers it.",
                    "max(mqmk_pool_version)",
                ),
                number("Tasks served", "Tasks in the current version.", "max(mqmk_pool_tasks)"),
                number("Classes served", "Classes in the current version.", "max(mqmk_pool_classes)"),
                number(
                    "Backlog",
                    "Tasks that are discovered but neither served nor set aside.",
                    "sum(mqmk_backlog_tasks)",
                ),
                number(
                    "Oldest in backlog",
                    "Age of the oldest task in the backlog.",
                    "max(mqmk_backlog_oldest_task_age_seconds)",
                    "s",
                    "low",
                    (3600.0, 21600.0),
                ),
                number(
                    "Time to serving (median)",
                    "Median over the last day of the time from a complete task in the bucket to every replica "
                    "serving it.",
                    quantile(0.5, "mqmk_task_time_to_serving_seconds_bucket", window="1d"),
                    "s",
                ),
                Panel(
                    "Tasks by state",
                    "Number of tasks in each state. A growing band other than SERVING is a growing backlog.",
                    "bars",
                    (Query("sum by (state) (mqmk_tasks)", "{{state}}"),),
                    width=12,
                ),
                Panel(
                    "Requests",
                    "Predictions per second by status code.",
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
