"""Does it answer, and how fast? Rate, errors and duration of predictions."""

from typing import Final

from mqmk.deploy.dashboard_panels import ERRORS, PREDICTIONS, Board, Panel, Query, Row, quantile, share

SERVING: Final = Board(
    "mqmk-serving",
    "MQMK: does it answer, and how fast?",
    "Rate, errors, duration of predictions.",
    (
        Row(
            "Rate and errors",
            (
                Panel(
                    "Requests",
                    "Requests a second by route and status code.",
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
                    "Which matcher answers.",
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
                    "Share of predictions with a server error (5xx), and of those told to come back (429).",
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
                    "Time to answer",
                    "Half, 95 and 99 of 100 predictions took at most this long.",
                    "timeseries",
                    tuple(
                        Query(quantile(share, 'ray_mqmk_request_seconds_bucket{stage="total"}'), f"{share * 100:g} %")
                        for share in (0.5, 0.95, 0.99)
                    ),
                    "s",
                ),
                Panel(
                    "Where the time goes",
                    "Mean time of each part: decode, queue, match.",
                    "bars",
                    (
                        Query(
                            'sum by (stage) (rate(ray_mqmk_request_seconds_sum{stage!="total"}[$__rate_interval])) / '
                            'sum by (stage) (rate(ray_mqmk_request_seconds_count{stage!="total"}[$__rate_interval]))',
                            "{{stage}}",
                        ),
                    ),
                    "s",
                ),
                Panel(
                    "All times",
                    "How the times of predictions are spread.",
                    "heatmap",
                    (
                        Query(
                            'sum by (le) (increase(ray_mqmk_request_seconds_bucket{stage="total"}[$__rate_interval]))',
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
                    "Pictures under way",
                    "Of those that may be under way at once; at 100 % requests are told to come back.",
                    "timeseries",
                    (Query("sum(ray_mqmk_inflight_images) / sum(ray_mqmk_inflight_limit_images)", "used"),),
                    "percentunit",
                    good="low",
                    limits=(0.7, 0.95),
                ),
                Panel(
                    "Pictures a batch",
                    "Mean size: batches grow by themselves under load.",
                    "timeseries",
                    (Query(share("ray_mqmk_batch_images_sum", "ray_mqmk_batch_images_count"), "pictures"),),
                ),
                Panel(
                    "Queries a picture",
                    "What matching costs in traffic, by matcher.",
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
                    "Version of each replica",
                    "All lines on the current version is fine; a line that stays behind refuses the new pool.",
                    "states",
                    (Query("mqmk_replica_pool_version", "{{replica}}"), Query("max(mqmk_pool_version)", "CURRENT")),
                ),
                Panel(
                    "Replicas",
                    "Wanted, alive, ready, and those on another version than CURRENT.",
                    "timeseries",
                    (
                        Query("sum(mqmk_replicas_configured)", "wanted"),
                        Query("sum(mqmk_replicas_live)", "live"),
                        Query("sum(mqmk_replicas_ready)", "ready"),
                        Query("sum(mqmk_replicas_skewed)", "other version"),
                    ),
                ),
                Panel(
                    "Swaps and refusals",
                    "Changes to another version, and pools that were refused, in the last hour.",
                    "bars",
                    (
                        Query("sum(increase(mqmk_replica_swaps_total[1h]))", "swaps"),
                        Query("sum by (stage) (increase(mqmk_replica_swap_failures_total[1h]))", "refused: {{stage}}"),
                    ),
                ),
            ),
        ),
    ),
)
