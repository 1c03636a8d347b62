"""Learning and forgetting: from a task in the bucket to accuracy over versions."""

from typing import Final

from mqmk.deploy.grafana.generator.panels import TASK, Board, Panel, Query, Row, quantile

LEARNING: Final = Board(
    "mqmk-learning",
    "MQMK: learning and forgetting",
    "From a complete task in the bucket to every replica serving it, and accuracy since.",
    (
        Row(
            "From bucket to serving",
            (
                Panel(
                    "Task timeline",
                    "State of each task over time, from discovery to every replica serving it.",
                    "states",
                    (Query(f"max by (task) (mqmk_task_step{TASK})", "{{task}}"),),
                    width=24,
                    height=10,
                    words={
                        0: ("set aside", "red"),
                        1: ("discovered", "super-light-blue"),
                        2: ("validated", "light-blue"),
                        3: ("training", "purple"),
                        4: ("trained", "orange"),
                        5: ("published", "yellow"),
                        6: ("serving", "green"),
                    },
                ),
                Panel(
                    "Time to serving",
                    "Time from a complete task in the bucket to every replica serving it.",
                    "timeseries",
                    (
                        Query(quantile(0.5, "mqmk_task_time_to_serving_seconds_bucket", window="1d"), "p50"),
                        Query(quantile(0.95, "mqmk_task_time_to_serving_seconds_bucket", window="1d"), "p95"),
                    ),
                    "s",
                    12,
                ),
                Panel(
                    "Time by stage",
                    "Mean time of each stage over the last day.",
                    "bars",
                    (
                        Query(
                            "sum by (stage) (rate(mqmk_task_stage_seconds_sum[1d])) / sum by (stage) "
                            "(rate(mqmk_task_stage_seconds_count[1d]) > 0)",
                            "{{stage}}",
                        ),
                    ),
                    "s",
                    12,
                ),
                Panel(
                    "State transitions",
                    "Transitions into each state in the last hour.",
                    "bars",
                    (Query("sum by (state) (increase(mqmk_task_transitions_total[1h]))", "{{state}}"),),
                    width=12,
                ),
                Panel(
                    "Needs attention",
                    "Tasks that wait for an operator, by state and reason.",
                    "table",
                    (Query("sum by (state, code) (mqmk_tasks_waiting_for_operator)"),),
                    width=12,
                ),
                Panel(
                    "Time since last event",
                    "Longest time since the last event of a task, by state. A line that keeps rising is a stuck task.",
                    "timeseries",
                    (Query("max by (state) (mqmk_task_last_event_age_seconds)", "{{state}}"),),
                    "s",
                ),
                Panel(
                    "Gate",
                    "Tasks that passed the gate or were held in the last day.",
                    "bars",
                    (Query("sum by (result) (increase(mqmk_gate_results_total[1d]))", "{{result}}"),),
                ),
                Panel(
                    "Retries",
                    "Failed steps that will be retried, in the last hour: of tasks, and of the daemon's loop.",
                    "timeseries",
                    (
                        Query("sum(increase(mqmk_task_retries_total[1h]))", "tasks"),
                        Query("sum(increase(mqmk_pass_failures_total[1h]))", "loop"),
                    ),
                ),
            ),
        ),
        Row(
            "Running trainings",
            (
                Panel(
                    "Progress",
                    "Share of epochs done, of every task in training.",
                    "timeseries",
                    (Query(f"mqmk_training_progress_ratio{TASK}", "{{task}}"),),
                    "percentunit",
                    6,
                ),
                Panel(
                    "Throughput",
                    "Images per second of every running training.",
                    "timeseries",
                    (Query(f"mqmk_training_images_per_second{TASK}", "{{task}}"),),
                    "short",
                    6,
                ),
                Panel(
                    "Loss",
                    "Mean loss of the last complete epoch.",
                    "timeseries",
                    (Query(f"mqmk_training_loss{TASK}", "{{task}}"),),
                    width=6,
                ),
                Panel(
                    "Time left",
                    "Estimated time until each training ends.",
                    "timeseries",
                    (Query(f"mqmk_training_remaining_seconds{TASK}", "{{task}}"),),
                    "s",
                    6,
                ),
            ),
        ),
        Row(
            "Accuracy over versions",
            (
                Panel(
                    "Accuracy by task",
                    "Held-out accuracy of each task. A line that drops with a new version is forgetting.",
                    "timeseries",
                    (Query(f"mqmk_heldout_task_accuracy_ratio{TASK}", "{{task}}"),),
                    "percentunit",
                    12,
                ),
                Panel(
                    "Forgetting",
                    "Accuracy when learned minus accuracy now. Prompts of old tasks never change, so a loss means that "
                    "images are matched to a newer task.",
                    "timeseries",
                    (Query(f"mqmk_heldout_forgetting_ratio{TASK}", "{{task}}"),),
                    "percentunit",
                    12,
                    good="low",
                    limits=(0.05, 0.15),
                ),
                Panel(
                    "Loss due to matching",
                    "Accuracy given the right task minus actual accuracy: the gain that perfect matching would bring.",
                    "timeseries",
                    (
                        Query(
                            f"mqmk_heldout_task_accuracy_given_task_ratio{TASK} - on (task) "
                            f"sum by (task) (mqmk_heldout_task_accuracy_ratio{TASK})",
                            "{{task}}",
                        ),
                    ),
                    "percentunit",
                    12,
                ),
                Panel(
                    "Versions",
                    "Current version, and its number of tasks and classes.",
                    "timeseries",
                    (
                        Query("max(mqmk_pool_version)", "version"),
                        Query("max(mqmk_pool_tasks)", "tasks"),
                        Query("max(mqmk_pool_classes)", "classes"),
                    ),
                    width=6,
                ),
                Panel(
                    "Published versions",
                    "Versions published in the last day, and those not yet recorded in MLflow, which happens when "
                    "it is reachable again.",
                    "timeseries",
                    (
                        Query("sum by (kind) (increase(mqmk_versions_total[1d]))", "{{kind}}"),
                        Query("max(mqmk_versions_unrecorded)", "not in MLflow"),
                    ),
                    width=6,
                ),
            ),
        ),
    ),
    by_task=True,
)
