"""Is it learning, is it forgetting? From a shard in the bucket to what is kept over versions."""

from typing import Final

from mqmk.deploy.dashboard_panels import TASK, Board, Panel, Query, Row, quantile

LEARNING: Final = Board(
    "mqmk-learning",
    "MQMK: is it learning, is it forgetting?",
    "From a complete shard in the bucket to every replica answering with it.",
    (
        Row(
            "From shard to served",
            (
                Panel(
                    "Timeline of tasks",
                    "Where each task was at each moment, from its discovery to every replica answering with it.",
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
                    "Shard to served",
                    "How long tasks took from complete in the bucket to served: the product's own number.",
                    "timeseries",
                    (
                        Query(quantile(0.5, "mqmk_shard_to_served_seconds_bucket", window="1d"), "median"),
                        Query(quantile(0.95, "mqmk_shard_to_served_seconds_bucket", window="1d"), "95 %"),
                    ),
                    "s",
                    12,
                ),
                Panel(
                    "Where the time goes",
                    "Mean time of each stage over the last day.",
                    "bars",
                    (
                        Query(
                            "sum by (stage) (rate(mqmk_stage_seconds_sum[1d])) / sum by (stage) "
                            "(rate(mqmk_stage_seconds_count[1d]) > 0)",
                            "{{stage}}",
                        ),
                    ),
                    "s",
                    12,
                ),
                Panel(
                    "Moves of tasks",
                    "Moves into each state in the last hour: the pulse of learning.",
                    "bars",
                    (Query("sum by (state) (increase(mqmk_task_transitions_total[1h]))", "{{state}}"),),
                    width=12,
                ),
                Panel(
                    "Waiting for a person",
                    "Tasks set aside, by reason.",
                    "table",
                    (Query("sum by (state, code) (mqmk_tasks_waiting_for_operator)"),),
                    width=12,
                ),
                Panel(
                    "Silence",
                    "The longest time without news of a task in each state: a line that only rises is a stuck task.",
                    "timeseries",
                    (Query("max by (state) (mqmk_task_quiet_seconds)", "{{state}}"),),
                    "s",
                ),
                Panel(
                    "Gate",
                    "Candidates that passed the gate or were held in the last day.",
                    "bars",
                    (Query("sum by (result) (increase(mqmk_gate_results_total[1d]))", "{{result}}"),),
                ),
                Panel(
                    "Tries again",
                    "Steps that failed and were put off in the last hour: of tasks, and of the daemon's loop.",
                    "timeseries",
                    (
                        Query("sum(increase(mqmk_task_retries_total[1h]))", "tasks"),
                        Query("sum(increase(mqmk_passes_failed_total[1h]))", "loop"),
                    ),
                ),
            ),
        ),
        Row(
            "Training now",
            (
                Panel(
                    "Progress",
                    "Epochs done of every task that is being learned.",
                    "timeseries",
                    (Query(f"mqmk_training_progress_ratio{TASK}", "{{task}}"),),
                    "percentunit",
                    6,
                ),
                Panel(
                    "Speed",
                    "Pictures a second of every running training.",
                    "timeseries",
                    (Query(f"mqmk_training_images_per_second{TASK}", "{{task}}"),),
                    "short",
                    6,
                ),
                Panel(
                    "Loss",
                    "Of the last whole epoch.",
                    "timeseries",
                    (Query(f"mqmk_training_loss{TASK}", "{{task}}"),),
                    width=6,
                ),
                Panel(
                    "Time left",
                    "Expected time to the end of each running training.",
                    "timeseries",
                    (Query(f"mqmk_training_left_seconds{TASK}", "{{task}}"),),
                    "s",
                    6,
                ),
            ),
        ),
        Row(
            "What is kept",
            (
                Panel(
                    "Accuracy over versions",
                    "Held-out accuracy of each task; a line that falls with a new version is forgetting.",
                    "timeseries",
                    (Query(f"mqmk_heldout_task_accuracy_ratio{TASK}", "{{task}}"),),
                    "percentunit",
                    12,
                ),
                Panel(
                    "Forgetting",
                    "Accuracy when learned minus accuracy now. Prompts of old tasks never change, so a loss means "
                    "that a "
                    "newer task takes their pictures.",
                    "timeseries",
                    (Query(f"mqmk_heldout_forgetting_ratio{TASK}", "{{task}}"),),
                    "percentunit",
                    12,
                    good="low",
                    limits=(0.05, 0.15),
                ),
                Panel(
                    "Lost by matching",
                    "Accuracy with every match right minus real accuracy: what better matching would bring.",
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
                    "Current version, and how many tasks and classes it holds.",
                    "timeseries",
                    (
                        Query("max(mqmk_pool_version)", "version"),
                        Query("max(mqmk_pool_tasks)", "tasks"),
                        Query("max(mqmk_pool_classes)", "classes"),
                    ),
                    width=6,
                ),
                Panel(
                    "Published and recorded",
                    "Versions that were published in the last day, and those that MLflow does not know yet; they are "
                    "caught up when it is back.",
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
