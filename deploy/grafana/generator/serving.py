"""Serving: rate, errors and duration of predictions."""

from typing import Final

from mqmk.deploy.grafana.generator.panels import ERRORS, PREDICTIONS, Board, Panel, Query, Row, quantile, share

DURATION: Final = "ray_mqmk_request_duration_seconds"

SERVING: Final = Board(
    "mqmk-serving",
    "MQMK: serving",
    "Rate, errors and duration of predictions; load; replicas.",
    (
        Row(
            "Rate and errors",
            (
                Panel(
                    "Requests",
                    "Requests per second by route and status code.",
                    "timeseries",
                    (
                        Query(
                            "sum by (route, code) (rate(ray_mqmk_requests_total[$__rate_interval]))",
                            "{{route}} {{code}}",
                        ),
                    ),
                    "reqps",
                ),
                Panel(
                    "Requests by matcher",
                    "Predictions per second by matcher.",
                    "timeseries",
                    (
                        Query(
                            f"sum by (matcher) (rate(ray_mqmk_requests_total{{{PREDICTIONS}}}[$__rate_interval]))",
                            "{{matcher}}",
                        ),
                    ),
                    "reqps",
                ),
                Panel(
                    "Errors",
                    "Share of predictions with a server error (5xx), and of those rejected by a full queue (429).",
                    "timeseries",
                    (
                        Query(f"{ERRORS} or vector(0)", "5xx"),
                        Query(
                            share(
                                f'ray_mqmk_requests_total{{{PREDICTIONS},code="429"}}',
                                f"ray_mqmk_requests_total{{{PREDICTIONS}}}",
                            )
                            + " or vector(0)",
                            "429",
                        ),
                    ),
                    "percentunit",
                    good="low",
                    limits=(0.001, 0.01),
                ),
            ),
        ),
        Row(
            "Duration",
            (
                Panel(
                    "Latency",
                    "Percentiles of the time of one prediction request.",
                    "timeseries",
                    tuple(
                        Query(
                            quantile(share, 'ray_mqmk_request_duration_seconds_bucket{stage="total"}'),
                            f"p{share * 100:g}",
                        )
                        for share in (0.5, 0.95, 0.99)
                    ),
                    "s",
                ),
                Panel(
                    "Time by stage",
                    "Mean time of each stage: decode, queue, match.",
                    "bars",
                    (
                        Query(
                            f'sum by (stage) (rate({DURATION}_sum{{stage!="total"}}[$__rate_interval])) / '
                            f'sum by (stage) (rate({DURATION}_count{{stage!="total"}}[$__rate_interval]))',
                            "{{stage}}",
                        ),
                    ),
                    "s",
                ),
                Panel(
                    "Latency distribution",
                    "Distribution of prediction times.",
                    "heatmap",
                    (
                        Query(
                            f'sum by (le) (increase({DURATION}_bucket{{stage="total"}}[$__rate_interval]))',
                            "{{le}}",
                        ),
                    ),
                    "s",
                ),
            ),
        ),
        Row(
            "Load",
            (
                Panel(
                    "In-flight images",
                    "As a share of the limit; at 100 % requests are rejected with 429.",
                    "timeseries",
                    (Query("sum(ray_mqmk_inflight_images) / sum(ray_mqmk_inflight_limit_images)", "used"),),
                    "percentunit",
                    good="low",
                    limits=(0.7, 0.95),
                ),
                Panel(
                    "Images per batch",
                    "Mean batch size; batches grow under load.",
                    "timeseries",
                    (Query(share("ray_mqmk_batch_images_sum", "ray_mqmk_batch_images_count"), "images"),),
                ),
                Panel(
                    "Queries per image",
                    "Cost of matching in traffic, by matcher.",
                    "timeseries",
                    (
                        Query(
                            share("ray_mqmk_queries_per_image_sum", "ray_mqmk_queries_per_image_count", "matcher"),
                            "{{matcher}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Replicas",
            (
                Panel(
                    "Replica versions",
                    "Version that each replica serves. One that stays behind has rejected the new pool.",
                    "states",
                    (Query("mqmk_replica_pool_version", "{{replica}}"), Query("max(mqmk_pool_version)", "CURRENT")),
                ),
                Panel(
                    "Replicas",
                    "Configured, live and ready replicas, and those that serve another version than CURRENT.",
                    "timeseries",
                    (
                        Query("sum(mqmk_replicas_configured)", "configured"),
                        Query("sum(mqmk_replicas_live)", "live"),
                        Query("sum(mqmk_replicas_ready)", "ready"),
                        Query("sum(mqmk_replicas_skewed)", "other version"),
                    ),
                ),
                Panel(
                    "Swaps and rejections",
                    "Changes to another version, and rejected pools, in the last hour.",
                    "bars",
                    (
                        Query("sum(increase(mqmk_replica_swaps_total[1h]))", "swaps"),
                        Query("sum by (stage) (increase(mqmk_replica_swap_failures_total[1h]))", "rejected: {{stage}}"),
                    ),
                ),
            ),
        ),
    ),
)
