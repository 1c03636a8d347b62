"""The metrics that replicas export: name, kind, labels, unit and description. Plain data; no Ray.

A replica creates each of them with `ray.serve.metrics`, which adds the labels `deployment`, `replica` and
`application`; Ray's agent adds the prefix `ray_`. Ray's counters reject zero: `counter.inc(ZERO)` exports one before it
counts. Ray's histograms reject bounds of zero or less, and the agent computes `_sum` from the middles of the buckets:
bounds for whole numbers lie between them, so that means are right.

There are four kinds of matching rate, and no name stands for two of them:
heldout (mqmk_heldout_*, by the daemon), labelled (mqmk_labelled_*), estimated (mqmk_estimated_*), agreement
(mqmk_agreement_*).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]
OTHER: Final = "other"
"""The label of all tasks beyond `metrics.task_labels`."""
RAY_PREFIX: Final = "ray_"
ZERO: Final = 5e-324
"""The smallest number above zero; adding it to a count changes no bit."""


@dataclass(frozen=True)
class Metric:
    """One declared metric."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    description: str
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram."""


def task_labels(names: Iterable[str], most: int) -> Mapping[str, str]:
    """The label of each task: its name for the first `most` in order, `other` for the rest."""
    distinct = list(dict.fromkeys(names))
    return {name: name if place < most else OTHER for place, name in enumerate(distinct)}


SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SCORES: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
MARGINS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
IMAGES: Final = (0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 12.5, 16.5, 24.5, 32.5, 48.5, 64.5)
QUERIES: Final = (0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 8.5, 16.5, 32.5, 64.5, 128.5, 256.5, 1024.5)

ROUTES: Final = ("predict", "infer", "feedback", "other")
STAGES: Final = ("decode", "queue", "match", "total")
FEEDBACK_RESULTS: Final = ("right", "wrong", "label_unknown", "id_unknown", "repeated")
NO_MATCHER: Final = "none"
"""The matcher of a request that was rejected before one was chosen."""

REPLICA_METRICS: Final = (
    # Requests
    Metric("mqmk_requests_total", "counter", ("route", "code", "matcher"), "requests",
           "Requests by route (predict, infer, feedback, other), HTTP status code and matcher (none if the request was "
           "rejected before one was chosen)."),
    Metric("mqmk_request_duration_seconds", "histogram", ("stage",), "seconds",
           "Time of one prediction request: decode (bytes to tensor), queue (waiting for the model), match "
           "(matching and classifying its batch), total (from the first byte to the response).", SECONDS),
    Metric("mqmk_batch_images", "histogram", (), "images", "Images in one batch of the model.", IMAGES),
    Metric("mqmk_queries_per_image", "histogram", ("matcher",), "queries",
           "Queries computed for one image: the cost of matching.", QUERIES),
    Metric("mqmk_inflight_images", "gauge", (), "images",
           "Images in flight in the replica, waiting ones included."),
    Metric("mqmk_inflight_limit_images", "gauge", (), "images",
           "Limit of images in flight; beyond it requests are rejected with 429."),
    # Answers
    Metric("mqmk_answers_total", "counter", ("task",), "images", "Answered images, by the matched task."),
    Metric("mqmk_calibrated_answers_total", "counter", ("matcher",), "images",
           "Answers for which the pool has a threshold for unknown images."),
    Metric("mqmk_unknown_answers_total", "counter", ("matcher",), "images",
           "Answers with a match score below that threshold: the image looks like nothing the pool knows."),
    Metric("mqmk_match_score", "histogram", ("matcher",), "cosine",
           "Match scores of answers: the sum of the K largest cosines with the keys of the matched task.", SCORES),
    Metric("mqmk_match_margin", "histogram", ("matcher",), "cosine",
           "Margins of answers: the score minus that of the runner-up.", MARGINS),
    # Matching rate: labelled
    Metric("mqmk_labelled_matches_total", "counter", ("task", "result"), "images",
           "Answers whose true label came as feedback, by the matched task and whether that task knows the label "
           "(matched, mismatched). Labelled matching rate = matched / (matched + mismatched)."),
    Metric("mqmk_feedback_total", "counter", ("result",), "labels",
           "Feedback by result: right, wrong, label_unknown (no task of that pool knows the label), id_unknown (the "
           "answer is not remembered: too late, or a wrong id), repeated (the answer already had feedback)."),
    # Matching rate: estimated
    Metric("mqmk_estimated_matches_total", "counter", ("task",), "images",
           "Sum over answers of the probability that the match is right, by the pool's calibration of score and "
           "margin (matcher/calibration.py). Estimated matching rate = this / mqmk_estimated_answers_total."),
    Metric("mqmk_estimated_answers_total", "counter", ("task",), "images",
           "Answers that have such a probability, by the matched task."),
    # Matching rate: agreement
    Metric("mqmk_agreement_answers_total", "counter", ("matcher", "result"), "images",
           "Sampled answers that were matched again exactly (mqmk), by whether both matched the same task (same, "
           "different). Agreement = same / (same + different)."),
    # Drift
    Metric("mqmk_drift_index", "gauge", ("task", "value"), "index",
           "Population stability index of the latest 500 images matched to a task against the held-out images, "
           "beyond what chance gives once in a thousand times; of the match `score` and of the `margin`. Above 0.25 "
           "the traffic has changed."),
    Metric("mqmk_drift_window_images", "gauge", ("task",), "images",
           "Images in the window of a task's drift index."),
)  # fmt: skip

RAY_OWN_METRICS: Final[Mapping[str, str]] = {
    "ray_node_cpu_utilization": "CPU use of a node, percent",
    "ray_node_cpu_count": "CPUs of a node",
    "ray_node_mem_used": "memory in use, bytes",
    "ray_node_mem_total": "memory, bytes",
    "ray_node_gpus_utilization": "GPU use, percent; only where there is one",
    "ray_node_gram_used": "GPU memory in use, megabytes; only where there is a GPU",
    "ray_node_disk_io_read_speed": "bytes read from disk per second",
    "ray_node_disk_io_write_speed": "bytes written to disk per second",
    "ray_object_store_used_memory": "shared memory in use, bytes",
    "ray_component_rss_bytes": "resident memory of Ray's processes, by component",
}
"""Ray's own metrics that the dashboards use."""
