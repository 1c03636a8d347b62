"""Matching: the four rates, confusion, margins, unknown images and drift."""

from typing import Final

from mqmk.deploy.grafana.generator.panels import (
    AGREEMENT,
    ESTIMATED,
    LABELLED,
    SERVING_RATE,
    TASK,
    Board,
    Panel,
    Query,
    Row,
    share,
)

MATCHING: Final = Board(
    "mqmk-matching",
    "MQMK: matching",
    "The four kinds of matching rate, confusion between tasks, margins, unknown images, drift.",
    (
        Row(
            "Matching rates",
            (
                Panel(
                    "Held-out",
                    "True rate on held-out images of each task, with the serving matcher. Changes only with the "
                    "version.",
                    "timeseries",
                    (Query(f"mqmk_heldout_task_matching_ratio{TASK}", "{{task}}"),),
                    "percentunit",
                    12,
                ),
                Panel(
                    "Labelled",
                    "Rate of answers whose true label came as feedback, by the matched task.",
                    "timeseries",
                    (
                        Query(
                            share(
                                'ray_mqmk_labelled_matches_total{result="matched",task=~"$task"}',
                                f"ray_mqmk_labelled_matches_total{TASK}",
                                "task",
                            ),
                            "{{task}}",
                        ),
                    ),
                    "percentunit",
                    12,
                ),
                Panel(
                    "Estimated",
                    "Rate without labels: the mean probability, from score and margin, that a match is right.",
                    "timeseries",
                    (
                        Query(
                            share(
                                f"ray_mqmk_estimated_matches_total{TASK}",
                                f"ray_mqmk_estimated_answers_total{TASK}",
                                "task",
                            ),
                            "{{task}}",
                        ),
                    ),
                    "percentunit",
                    12,
                ),
                Panel(
                    "Agreement with exact matching",
                    "Sampled answers for which exact matching gives the same task, by matcher.",
                    "timeseries",
                    (
                        Query(
                            share(
                                'ray_mqmk_agreement_answers_total{result="same"}',
                                "ray_mqmk_agreement_answers_total",
                                "matcher",
                            ),
                            "{{matcher}}",
                        ),
                    ),
                    "percentunit",
                    12,
                ),
                Panel(
                    "All rates",
                    "The four rates over all tasks. Labelled below held-out: traffic is harder than the held-out "
                    "images. Estimated far from labelled: do not trust the estimate.",
                    "timeseries",
                    (
                        Query(SERVING_RATE, "heldout"),
                        Query(LABELLED, "labelled"),
                        Query(ESTIMATED, "estimated"),
                        Query(AGREEMENT, "agreement"),
                    ),
                    "percentunit",
                    12,
                ),
                Panel(
                    "Calibration error",
                    "How far the `probability` of answers is from the share that is right, on average over held-out "
                    "images, with the serving matcher.",
                    "stat",
                    (Query("mqmk_heldout_calibration_error_ratio", "{{matcher}}"),),
                    "percentunit",
                    6,
                    good="low",
                    limits=(0.05, 0.1),
                ),
                Panel(
                    "Estimation error",
                    "Difference between estimated and true rate on held-out images that the fit did not use, "
                    "and the expected calibration error of single probabilities there.",
                    "stat",
                    (
                        Query("mqmk_estimated_rate_error_ratio", "{{matcher}}"),
                        Query("mqmk_estimated_calibration_error_ratio", "{{matcher}}, single"),
                    ),
                    "percentunit",
                    6,
                    good="low",
                    limits=(0.05, 0.1),
                ),
            ),
        ),
        Row(
            "Task confusion",
            (
                Panel(
                    "Confusion matrix",
                    "Held-out images: rows are true tasks, columns matched tasks. Off-diagonal cells are wrong "
                    "matches; two tasks that are confused with each other look alike.",
                    "matrix",
                    (Query('sum by (true_task, matched_task) (mqmk_heldout_confusion_images{true_task=~"$task"})'),),
                    width=16,
                    height=12,
                ),
                Panel(
                    "Most confused pairs",
                    "The 20 pairs of tasks with the most wrong matches.",
                    "table",
                    (
                        Query(
                            "topk(20, sum by (true_task, matched_task) (mqmk_heldout_confusion_images) "
                            "unless on (true_task, matched_task) "
                            "label_replace(sum by (true_task) (mqmk_heldout_confusion_images), "
                            '"matched_task", "$1", "true_task", "(.*)"))'
                        ),
                    ),
                    height=12,
                ),
            ),
        ),
        Row(
            "Matchers",
            (
                Panel(
                    "Matching rate by matcher",
                    "True rate of every matcher on the same held-out images.",
                    "timeseries",
                    (Query("mqmk_heldout_matching_ratio", "{{matcher}}"),),
                    "percentunit",
                ),
                Panel(
                    "Queries per image",
                    "Cost of every matcher there: `auto` takes the best one within `serve.budget`.",
                    "timeseries",
                    (Query("mqmk_heldout_queries_per_image", "{{matcher}}"),),
                ),
                Panel(
                    "Accuracy by matcher",
                    "Accuracy of the label with every matcher.",
                    "timeseries",
                    (Query("mqmk_heldout_accuracy_ratio", "{{matcher}}"),),
                    "percentunit",
                ),
            ),
        ),
        Row(
            "Margins, unknown images, drift",
            (
                Panel(
                    "Scores",
                    "Match scores of traffic. A falling band means unfamiliar images.",
                    "heatmap",
                    (Query("sum by (le) (increase(ray_mqmk_match_score_bucket[$__rate_interval]))", "{{le}}"),),
                ),
                Panel(
                    "Margins",
                    "Distance to the runner-up. A falling band means less certain matches.",
                    "heatmap",
                    (Query("sum by (le) (increase(ray_mqmk_match_margin_bucket[$__rate_interval]))", "{{le}}"),),
                ),
                Panel(
                    "Unknown images",
                    "Share of answers with a score below the threshold; 1 % of held-out images are below it.",
                    "timeseries",
                    (
                        Query(
                            share("ray_mqmk_unknown_answers_total", "ray_mqmk_calibrated_answers_total", "matcher"),
                            "{{matcher}}",
                        ),
                    ),
                    "percentunit",
                ),
                Panel(
                    "Score drift",
                    "Population stability index of the latest 500 images of a task against the held-out ones. "
                    "Below 0.1: no change. Above 0.25: the traffic has changed.",
                    "timeseries",
                    (Query('max by (task) (ray_mqmk_drift_index{value="score",task=~"$task"})', "{{task}}"),),
                    width=12,
                    good="low",
                    limits=(0.1, 0.25),
                ),
                Panel(
                    "Margin drift",
                    "Population stability index of the margins, likewise.",
                    "timeseries",
                    (Query('max by (task) (ray_mqmk_drift_index{value="margin",task=~"$task"})', "{{task}}"),),
                    width=12,
                    good="low",
                    limits=(0.1, 0.25),
                ),
                Panel(
                    "Answers by task",
                    "Answers per second by matched task.",
                    "bars",
                    (Query(f"sum by (task) (rate(ray_mqmk_answers_total{TASK}[$__rate_interval]))", "{{task}}"),),
                    "cps",
                    12,
                ),
                Panel(
                    "Feedback",
                    "Labels per second, by result. Many id_unknown: feedback arrives after the answers were forgotten.",
                    "bars",
                    (Query("sum by (result) (rate(ray_mqmk_feedback_total[$__rate_interval]))", "{{result}}"),),
                    "cps",
                    12,
                ),
            ),
        ),
    ),
    by_task=True,
)
