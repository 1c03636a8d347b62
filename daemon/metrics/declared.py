"""The metrics of the daemon, declared together: name, kind, labels, unit and description."""

from typing import Final

from mqmk.deploy.serving.telemetry.declared import Metric

TIME_TO_SERVING_BUCKETS: Final = (
    5.0,
    10.0,
    20.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1200.0,
    1800.0,
    3600.0,
    7200.0,
    21600.0,
    86400.0,
)
PASS_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STAGES: Final = ("validate", "wait", "train", "publish", "roll_out")
STEPS: Final = ("DISCOVERED", "VALIDATED", "TRAINING", "TRAINED", "PUBLISHED", "SERVING")
"""The states of a task on its way to serving; the first one is step 1."""
DEPENDENCIES: Final = ("state", "disk")
"""Dependencies that are recorded only when they fail; exported as up before that."""
CODES: Final = (("QUARANTINED", "gave-up"), ("QUARANTINED", "failed"), ("CONFLICT", "conflict"),
                ("CONFLICT", "same-content"), ("HELD", "gate"), ("HELD", "rolled-back"))  # fmt: skip
"""Exported as zero before they happen; a quarantine by validation has the code of its rejection."""

DAEMON_METRICS: Final = (
    # The daemon itself
    Metric("mqmk_daemon_info", "gauge", ("version", "backbone", "matcher"), "",
           "Always 1; the labels describe the daemon."),
    Metric("mqmk_daemon_start_timestamp_seconds", "gauge", (), "seconds", "When the daemon started serving metrics."),
    Metric("mqmk_ledger_up", "gauge", (), "",
           "1 if the ledger could be read for this scrape; if not, all metrics read from it are missing."),
    Metric("mqmk_pass_duration_seconds", "histogram", (), "seconds", "Duration of one pass of the daemon's loop.",
           PASS_BUCKETS),
    Metric("mqmk_pass_failures_total", "counter", (), "passes", "Passes of the loop that failed and were retried."),
    Metric("mqmk_last_pass_timestamp_seconds", "gauge", (), "seconds",
           "When the loop last finished a pass; 0 before the first one."),
    Metric("mqmk_dependency_up", "gauge", ("dependency",), "",
           "1 if a dependency works: bucket, ray, mlflow, pools (S3), backbone, disk, state (the state directory)."),
    Metric("mqmk_state_disk_free_bytes", "gauge", (), "bytes", "Free space on the file system of the state directory."),
    Metric("mqmk_state_disk_size_bytes", "gauge", (), "bytes", "Size of the file system of the state directory."),
    # Tasks
    Metric("mqmk_tasks", "gauge", ("state",), "tasks", "Tasks in each state of the ledger."),
    Metric("mqmk_tasks_waiting_for_operator", "gauge", ("state", "code"), "tasks",
           "Tasks that need an operator: QUARANTINED, CONFLICT and HELD, by the code of the reason."),
    Metric("mqmk_task_step", "gauge", ("task",), "",
           "Progress of each task: 1 discovered, 2 validated, 3 training, 4 trained, 5 published, 6 serving; 0 is set "
           "aside (quarantined, in conflict or held). `other` shows the one that is furthest behind."),
    Metric("mqmk_backlog_tasks", "gauge", (), "tasks",
           "Tasks in progress: discovered, not yet serving and not set aside."),
    Metric("mqmk_backlog_oldest_task_age_seconds", "gauge", (), "seconds",
           "Age of the oldest task in the backlog; 0 if there is none."),
    Metric("mqmk_task_last_event_age_seconds", "gauge", ("state",), "seconds",
           "Longest time since the last event of a backlog task in this state; a large value means it is stuck."),
    Metric("mqmk_task_transitions_total", "counter", ("state",), "transitions",
           "Transitions of tasks into each state, since the state directory was created."),
    Metric("mqmk_task_retries_total", "counter", (), "retries",
           "Retries scheduled after a step of a task failed, since the state directory was created."),
    Metric("mqmk_commands_pending", "gauge", (), "commands", "Operator commands that are queued."),
    Metric("mqmk_commands_total", "counter", ("kind", "result"), "commands",
           "Operator commands by result: DONE or REFUSED."),
    # Learning
    Metric("mqmk_task_time_to_serving_seconds", "histogram", (), "seconds",
           "Time from the discovery of a complete task until all replicas serve it: the product's main service level. "
           "Time spent waiting for an operator does not count; the operator's command starts the clock again.",
           TIME_TO_SERVING_BUCKETS),
    Metric("mqmk_task_stage_seconds", "histogram", ("stage",), "seconds",
           "The stages of that time: validate, wait (for a worker), train, publish (evaluate, gate, store), roll_out.",
           TIME_TO_SERVING_BUCKETS),
    Metric("mqmk_training_progress_ratio", "gauge", ("task",), "ratio",
           "Share of the epochs that a running training has finished, from 0 to 1."),
    Metric("mqmk_training_images_per_second", "gauge", ("task",), "images/second",
           "Throughput of a running training."),
    Metric("mqmk_training_loss", "gauge", ("task",), "", "Loss of the last complete epoch of a running training."),
    Metric("mqmk_training_remaining_seconds", "gauge", ("task",), "seconds",
           "Estimated time until a running training ends."),
    Metric("mqmk_training_epochs_total", "counter", (), "epochs",
           "Epochs trained, since the state directory was created."),
    Metric("mqmk_gate_results_total", "counter", ("result",), "tasks", "Trained tasks that the gate passed or held."),
    # Pool
    Metric("mqmk_pool_version", "gauge", (), "", "The current pool version (CURRENT); 0 before the first."),
    Metric("mqmk_pool_tasks", "gauge", (), "tasks", "Tasks in the current version."),
    Metric("mqmk_pool_classes", "gauge", (), "classes", "Classes in the current version."),
    Metric("mqmk_pool_bytes", "gauge", (), "bytes", "Size of the files of the current version."),
    Metric("mqmk_pool_created_timestamp_seconds", "gauge", (), "seconds",
           "When the current version was built; 0 before the first."),
    Metric("mqmk_versions_total", "counter", ("kind",), "versions", "Published versions by kind: learn or forget."),
    Metric("mqmk_versions_unrecorded", "gauge", (), "versions",
           "Published versions that are not recorded in MLflow yet."),
    # Replicas, as they report themselves
    Metric("mqmk_replicas_configured", "gauge", (), "replicas", "Configured replicas; 0 if nothing is served."),
    Metric("mqmk_replicas_live", "gauge", (), "replicas", "Replicas with a recent heartbeat."),
    Metric("mqmk_replicas_ready", "gauge", (), "replicas", "Live replicas that have loaded a pool and take requests."),
    Metric("mqmk_replicas_skewed", "gauge", (), "replicas",
           "Live replicas that serve another version than the current one."),
    Metric("mqmk_replica_pool_version", "gauge", ("replica",), "",
           "The version that a replica serves; 0 before the first."),
    Metric("mqmk_replica_swaps_total", "counter", ("replica",), "swaps",
           "Times that a replica changed to another version."),
    Metric("mqmk_replica_swap_failures_total", "counter", ("replica", "stage"), "pools",
           "Pools that a replica rejected, by stage: pointer, read, fit, replay, warm-up."),
    Metric("mqmk_replica_pool_rejected", "gauge", ("replica",), "",
           "1 while a replica rejects the current version."),
    # Matching rate: heldout
    Metric("mqmk_heldout_images", "gauge", (), "images",
           "Held-out images on which the current version was evaluated."),
    Metric("mqmk_heldout_matching_ratio", "gauge", ("matcher",), "ratio",
           "True matching rate of each matcher on held-out images of all tasks, in the current version."),
    Metric("mqmk_heldout_accuracy_ratio", "gauge", ("matcher",), "ratio",
           "Accuracy of the label on the same images."),
    Metric("mqmk_heldout_calibration_error_ratio", "gauge", ("matcher",), "ratio",
           "Expected calibration error of `probability` on the same images, with the matcher that serves."),
    Metric("mqmk_heldout_queries_per_image", "gauge", ("matcher",), "queries",
           "Cost of each matcher on the same images."),
    Metric("mqmk_heldout_task_matching_ratio", "gauge", ("task", "matcher"), "ratio",
           "True matching rate of each task's held-out images, with the matcher that serves; `other` is the mean of "
           "the rest."),
    Metric("mqmk_heldout_task_accuracy_ratio", "gauge", ("task", "matcher"), "ratio",
           "Accuracy of the label on the same images."),
    Metric("mqmk_heldout_task_accuracy_given_task_ratio", "gauge", ("task",), "ratio",
           "Accuracy if every match were right, which is what the gate checks; the gap between this and the accuracy "
           "is what matching loses."),
    Metric("mqmk_heldout_forgetting_ratio", "gauge", ("task",), "ratio",
           "Accuracy of a task when it was learned minus its accuracy now; above 0, part of it was forgotten."),
    Metric("mqmk_heldout_confusion_images", "gauge", ("true_task", "matched_task"), "images",
           "Held-out images by true and matched task. The 500 most frequent mistakes have their own series; the other "
           "mistakes of a true task are in matched_task `other`."),
    # What the pool ships for replicas
    Metric("mqmk_estimated_calibration_error_ratio", "gauge", ("matcher",), "ratio",
           "Expected calibration error of the label-free estimate, on held-out images that were left out of its fit."),
    Metric("mqmk_estimated_rate_error_ratio", "gauge", ("matcher",), "ratio",
           "Mean difference between the estimated and the true matching rate on such images, over random halves."),
    Metric("mqmk_unknown_threshold", "gauge", ("matcher",), "cosine",
           "Match score below which an image is flagged as unknown."),
)  # fmt: skip

BY_NAME: Final = {metric.name: metric for metric in DAEMON_METRICS}
