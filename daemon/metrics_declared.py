"""What the daemon exports, declared together: name, kind, labels, unit and what it means."""

from typing import Final

from mqmk.deploy.metric_names import Metric

TO_SERVED: Final = (5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0)
PASS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STAGES: Final = ("validate", "wait", "train", "publish", "roll_out")
STEPS: Final = ("DISCOVERED", "VALIDATED", "TRAINING", "TRAINED", "PUBLISHED", "SERVING")
"""The way of a task; the first one is step 1."""
PARTS: Final = ("state", "disk")
"""Dependencies that are only heard of when they fail; shown as up before."""
CODES: Final = (("QUARANTINED", "gave-up"), ("QUARANTINED", "failed"), ("CONFLICT", "conflict"),
                ("CONFLICT", "same-content"), ("HELD", "gate"), ("HELD", "rolled-back"))  # fmt: skip
"""Shown as zero before they happen; a quarantine by validation has the code of its rejection."""

DAEMON_METRICS: Final = (
    # The daemon itself
    Metric("mqmk_daemon_info", "gauge", ("version", "backbone", "matcher"), "", "Always 1; its labels say what runs."),
    Metric("mqmk_daemon_start_timestamp_seconds", "gauge", (), "seconds", "When the daemon began to serve metrics."),
    Metric("mqmk_ledger_up", "gauge", (), "",
           "1 if the ledger could be read for this scrape; without it the rest is missing."),
    Metric("mqmk_pass_seconds", "histogram", (), "seconds", "Time of one turn of the daemon's loop.", PASS),
    Metric("mqmk_passes_failed_total", "counter", (), "passes", "Turns of the loop that failed and were tried again."),
    Metric("mqmk_last_pass_timestamp_seconds", "gauge", (), "seconds",
           "When the loop last came round; 0 before the first time."),
    Metric("mqmk_dependency_up", "gauge", ("dependency",), "",
           "1 if something the daemon depends on works: bucket, ray, mlflow, pools (S3), disk, state (its folder)."),
    Metric("mqmk_state_disk_free_bytes", "gauge", (), "bytes", "Free space where the state directory is."),
    Metric("mqmk_state_disk_size_bytes", "gauge", (), "bytes", "Size of the file system where the state directory is."),
    # Tasks
    Metric("mqmk_tasks", "gauge", ("state",), "tasks", "Tasks in each state of the ledger."),
    Metric("mqmk_tasks_waiting_for_operator", "gauge", ("state", "code"), "tasks",
           "Tasks that go on only when a person acts: QUARANTINED, CONFLICT and HELD, by the code of the reason."),
    Metric("mqmk_task_step", "gauge", ("task",), "",
           "How far each task came: 1 discovered, 2 validated, 3 training, 4 trained, 5 published, 6 serving; 0 is set "
           "aside (quarantined, in conflict or held). `other` shows the one that is furthest behind."),
    Metric("mqmk_backlog_tasks", "gauge", (), "tasks",
           "Tasks on their way: discovered, but not served yet and not set aside."),
    Metric("mqmk_oldest_pending_seconds", "gauge", (), "seconds",
           "Age of the oldest task of the backlog; 0 if there is none."),
    Metric("mqmk_task_quiet_seconds", "gauge", ("state",), "seconds",
           "Longest time that a task of the backlog in this state has been without any event; large means stuck."),
    Metric("mqmk_task_transitions_total", "counter", ("state",), "transitions",
           "Moves of tasks into each state, ever."),
    Metric("mqmk_task_retries_total", "counter", (), "tries", "Steps of tasks that failed and were put off, ever."),
    Metric("mqmk_commands_pending", "gauge", (), "commands", "Commands of operators that are not done yet."),
    Metric("mqmk_commands_total", "counter", ("kind", "result"), "commands",
           "Commands of operators that were answered, DONE or REFUSED."),
    # Learning
    Metric("mqmk_shard_to_served_seconds", "histogram", (), "seconds",
           "From the discovery of a complete task to every replica answering with it: the product's own "
           "number. Time that a task waits for a person does not count; the clock starts again with the "
           "person's command.", TO_SERVED),
    Metric("mqmk_stage_seconds", "histogram", ("stage",), "seconds",
           "The parts of that time: validate, wait (for a worker), train, publish (evaluate, gate, "
           "store), roll_out.", TO_SERVED),
    Metric("mqmk_training_progress_ratio", "gauge", ("task",), "ratio",
           "Epochs done of a task that is being learned, from 0 to 1."),
    Metric("mqmk_training_images_per_second", "gauge", ("task",), "pictures/second", "Speed of a running training."),
    Metric("mqmk_training_loss", "gauge", ("task",), "", "Loss of the last whole epoch of a running training."),
    Metric("mqmk_training_left_seconds", "gauge", ("task",), "seconds",
           "Expected time to the end of a running training."),
    Metric("mqmk_training_epochs_total", "counter", (), "epochs", "Epochs that were trained, ever."),
    Metric("mqmk_gate_results_total", "counter", ("result",), "versions", "Candidates that the gate passed or held."),
    # Pool
    Metric("mqmk_pool_version", "gauge", (), "", "The version that CURRENT names; 0 before the first."),
    Metric("mqmk_pool_tasks", "gauge", (), "tasks", "Tasks in that version."),
    Metric("mqmk_pool_classes", "gauge", (), "classes", "Classes in that version."),
    Metric("mqmk_pool_bytes", "gauge", (), "bytes", "Size of the files of that version."),
    Metric("mqmk_pool_created_timestamp_seconds", "gauge", (), "seconds",
           "When that version was built; 0 before the first."),
    Metric("mqmk_versions_total", "counter", ("kind",), "versions", "Versions that were published: learn or forget."),
    Metric("mqmk_versions_unrecorded", "gauge", (), "versions", "Published versions that MLflow does not know yet."),
    # Replicas, as they report themselves
    Metric("mqmk_replicas_configured", "gauge", (), "replicas", "Replicas that are wanted; 0 where nothing is served."),
    Metric("mqmk_replicas_live", "gauge", (), "replicas", "Replicas whose report is fresh."),
    Metric("mqmk_replicas_ready", "gauge", (), "replicas", "Live replicas that hold a pool and take requests."),
    Metric("mqmk_replicas_skewed", "gauge", (), "replicas",
           "Live replicas that answer with another version than CURRENT names."),
    Metric("mqmk_replica_pool_version", "gauge", ("replica",), "",
           "The version that a replica answers with; 0 before the first."),
    Metric("mqmk_replica_swaps_total", "counter", ("replica",), "swaps",
           "Times that a replica changed to another version."),
    Metric("mqmk_replica_swap_failures_total", "counter", ("replica", "stage"), "pools",
           "Pools that a replica refused, by where: pointer, read, fit, replay, warm-up."),
    Metric("mqmk_replica_refusing", "gauge", ("replica",), "",
           "1 while a replica refuses the version that CURRENT names."),
    # Matching rate: heldout
    Metric("mqmk_heldout_images", "gauge", (), "pictures",
           "Held-out pictures that the current version was measured on."),
    Metric("mqmk_heldout_matching_ratio", "gauge", ("matcher",), "ratio",
           "True matching rate of each matcher on held-out pictures of all tasks, after the current version."),
    Metric("mqmk_heldout_accuracy_ratio", "gauge", ("matcher",), "ratio",
           "Accuracy of the label on the same pictures."),
    Metric("mqmk_heldout_queries_per_image", "gauge", ("matcher",), "queries",
           "What each matcher costs on the same pictures."),
    Metric("mqmk_heldout_task_matching_ratio", "gauge", ("task", "matcher"), "ratio",
           "True matching rate of each task's held-out pictures, by the matcher that serves; `other` is the mean of "
           "the rest."),
    Metric("mqmk_heldout_task_accuracy_ratio", "gauge", ("task", "matcher"), "ratio",
           "Accuracy of the label, the same way."),
    Metric("mqmk_heldout_task_accuracy_given_task_ratio", "gauge", ("task",), "ratio",
           "Accuracy if every match were right: what the gate judges; the distance to the accuracy is lost by "
           "matching."),
    Metric("mqmk_heldout_forgetting_ratio", "gauge", ("task",), "ratio",
           "Accuracy of a task when it was learned minus its accuracy now; above 0 it was forgotten in part."),
    Metric("mqmk_heldout_confusion_images", "gauge", ("true_task", "matched_task"), "pictures",
           "Held-out pictures by their true and their matched task. The largest 500 mistakes have a series of their "
           "own; the rest of a true task's mistakes are in matched_task `other`."),
    # What the pool ships for replicas
    Metric("mqmk_estimated_calibration_error_ratio", "gauge", ("matcher",), "ratio",
           "Expected calibration error of the estimate without labels, on held-out pictures left out of its fit."),
    Metric("mqmk_estimated_rate_error_ratio", "gauge", ("matcher",), "ratio",
           "How far the estimated matching rate was from the true one on such pictures, mean over random halves."),
    Metric("mqmk_unknown_threshold", "gauge", ("matcher",), "cosine",
           "Match score below which a picture is called unknown."),
)  # fmt: skip

BY_NAME: Final = {metric.name: metric for metric in DAEMON_METRICS}
