"""Does it match the right prompts? The four rates, confusion, margins, unknown pictures and drift."""

from typing import Final

from mqmk.deploy.dashboard_panels import (
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
    "MQMK: does it match the right prompts?",
    "The four kinds of matching rate, confusion between tasks, margins, unknown pictures, drift.",
    (
        Row(
            "Four matching rates, never mixed",
            (
                Panel(
                    "Held-out",
                    "True rate on held-out pictures of each task, by the matcher that serves; changes with versions "
                    "only.",
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
                    "All four",
                    "The four rates over all tasks, to be compared. Labelled below held-out: traffic is harder than "
                    "the "
                    "held-out pictures. Estimated far from labelled: do not trust the estimate.",
                    "timeseries",
                    (
                        Query(SERVING_RATE, "heldout"),
                        Query(LABELLED, "labelled"),
                        Query(ESTIMATED, "estimated"),
                        Query(AGREEMENT, "agreement"),
                    ),
                    "percentunit",
                    16,
                ),
                Panel(
                    "Error of the estimate",
                    "How far the estimated rate was from the true one on held-out pictures that its fit did not see; "
                    "and the mean error of single probabilities there (expected calibration error).",
                    "stat",
                    (
                        Query("mqmk_estimated_rate_error_ratio", "{{matcher}}"),
                        Query("mqmk_estimated_calibration_error_ratio", "{{matcher}}, single"),
                    ),
                    "percentunit",
                    8,
                    good="low",
                    limits=(0.05, 0.1),
                ),
            ),
        ),
        Row(
            "Who is taken for whom",
            (
                Panel(
                    "Confusion of tasks",
                    "Held-out pictures: rows are true tasks, columns matched tasks. Off the diagonal are mistakes; "
                    "two tasks that take each other's pictures look alike.",
                    "matrix",
                    (Query('sum by (true_task, matched_task) (mqmk_heldout_confusion_images{true_task=~"$task"})'),),
                    width=16,
                    height=12,
                ),
                Panel(
                    "Largest mistakes",
                    "The pairs of tasks that are confused most.",
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
                    "True rate of every matcher on the same held-out pictures.",
                    "timeseries",
                    (Query("mqmk_heldout_matching_ratio", "{{matcher}}"),),
                    "percentunit",
                ),
                Panel(
                    "Queries a picture",
                    "What every matcher costs there: `auto` takes the best one within `serve.budget`.",
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
            "Margins, unknown pictures, drift",
            (
                Panel(
                    "Scores",
                    "Match scores of traffic; a band that sinks means unfamiliar pictures.",
                    "heatmap",
                    (Query("sum by (le) (increase(ray_mqmk_match_score_bucket[$__rate_interval]))", "{{le}}"),),
                ),
                Panel(
                    "Margins",
                    "Distance to the runner-up; a band that sinks means less certain matches.",
                    "heatmap",
                    (Query("sum by (le) (increase(ray_mqmk_match_margin_bucket[$__rate_interval]))", "{{le}}"),),
                ),
                Panel(
                    "Unknown pictures",
                    "Share of answers below the threshold that 1 % of held-out pictures are below.",
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
                    "Drift of scores",
                    "Population stability index of the latest 500 pictures of a task against the held-out ones. "
                    "Below 0.1 nothing changed, above 0.25 the traffic is of another kind.",
                    "timeseries",
                    (Query('max by (task) (ray_mqmk_drift_index{value="score",task=~"$task"})', "{{task}}"),),
                    width=12,
                    good="low",
                    limits=(0.1, 0.25),
                ),
                Panel(
                    "Drift of margins",
                    "The same for margins.",
                    "timeseries",
                    (Query('max by (task) (ray_mqmk_drift_index{value="margin",task=~"$task"})', "{{task}}"),),
                    width=12,
                    good="low",
                    limits=(0.1, 0.25),
                ),
                Panel(
                    "Answers by task",
                    "Which tasks traffic is matched to.",
                    "bars",
                    (Query(f"sum by (task) (rate(ray_mqmk_answers_total{TASK}[$__rate_interval]))", "{{task}}"),),
                    "cps",
                    12,
                ),
                Panel(
                    "Feedback",
                    "Labels that came, by what they said. Many id_unknown: feedback comes later than answers are "
                    "remembered.",
                    "bars",
                    (Query("sum by (verdict) (rate(ray_mqmk_feedback_total[$__rate_interval]))", "{{verdict}}"),),
                    "cps",
                    12,
                ),
            ),
        ),
    ),
    by_task=True,
)
