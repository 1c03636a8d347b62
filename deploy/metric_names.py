"""What replicas export, declared together: name, kind, labels, unit and what it means. Plain data; no Ray.

A replica makes each of them with `ray.serve.metrics`, which adds the labels `deployment`, `replica` and `application`;
Ray's agent shows it with `ray_` in front. Ray's counters refuse zero: `counter.inc(ZERO)` shows one before it counts.
Ray's histograms refuse bounds of zero or less, and their agent makes `_sum` from the middles of the buckets: bounds of
what is counted in whole numbers lie between them, so that their means are right.

The matching rate has four kinds, and no name stands for two of them:
heldout (mqmk_heldout_*, by the daemon), labelled (mqmk_labelled_*), estimated (mqmk_estimated_*), agreement
(mqmk_agreement_*).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]
OTHER: Final = "other"
"""The label of every task beyond `metrics.task_labels`."""
RAY_PREFIX: Final = "ray_"
ZERO: Final = 5e-324
"""The smallest number above zero; added to anything that was counted it changes no bit."""


@dataclass(frozen=True)
class Metric:
    """One declared metric."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    description: str
    buckets: tuple[float, ...] = ()
    """Upper bounds, of a histogram."""


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
VERDICTS: Final = ("right", "wrong", "label_unknown", "id_unknown", "repeated")
NO_MATCHER: Final = "none"
"""The matcher of a request that was answered before one was chosen."""

REPLICA_METRICS: Final = (
    # Requests
    Metric("mqmk_requests_total", "counter", ("route", "code", "matcher"), "requests",
           "Requests that were answered, by route (predict, infer, feedback, other), HTTP status code and matcher "
           "(none where the request was refused before one was chosen)."),
    Metric("mqmk_request_seconds", "histogram", ("stage",), "seconds",
           "Time of one prediction request: decode (bytes to tensor), queue (waiting for the model), match "
           "(matching and classifying its batch), total (from the first byte to the answer).", SECONDS),
    Metric("mqmk_batch_images", "histogram", (), "pictures", "Pictures that were computed together.", IMAGES),
    Metric("mqmk_queries_per_image", "histogram", ("matcher",), "queries",
           "Queries that were computed for one picture, which is what matching costs.", QUERIES),
    Metric("mqmk_inflight_images", "gauge", (), "pictures",
           "Pictures under way in the replica, waiting ones included."),
    Metric("mqmk_inflight_limit_images", "gauge", (), "pictures",
           "Pictures that may be under way; the next request is answered with 429."),
    # Answers
    Metric("mqmk_answers_total", "counter", ("task",), "pictures", "Pictures that were answered, by the matched task."),
    Metric("mqmk_calibrated_answers_total", "counter", ("matcher",), "pictures",
           "Answers for which the pool knows a threshold of unknown pictures."),
    Metric("mqmk_unknown_answers_total", "counter", ("matcher",), "pictures",
           "Answers whose match score lies below that threshold: the picture looks like nothing the pool knows."),
    Metric("mqmk_match_score", "histogram", ("matcher",), "cosine",
           "Match scores of answers: the sum of the K largest cosines with the keys of the matched task.", SCORES),
    Metric("mqmk_match_margin", "histogram", ("matcher",), "cosine",
           "Margins of answers: the score minus that of the runner-up.", MARGINS),
    # Matching rate: labelled
    Metric("mqmk_labelled_matches_total", "counter", ("task", "result"), "pictures",
           "Answers whose true label came as feedback, by the matched task and whether that task knows the label "
           "(matched, mismatched). Labelled matching rate = matched / (matched + mismatched)."),
    Metric("mqmk_feedback_total", "counter", ("verdict",), "labels",
           "Feedback by what it said: right, wrong, label_unknown (no task of that pool knows the label), id_unknown "
           "(the answer is not remembered: late, or a wrong id), repeated (the answer had its feedback before)."),
    # Matching rate: estimated
    Metric("mqmk_estimated_matches_total", "counter", ("task",), "pictures",
           "Sum over answers of the probability that the match is right, by the pool's calibration of score and "
           "margin (matcher/calibration.py). Estimated matching rate = this / mqmk_estimated_answers_total."),
    Metric("mqmk_estimated_answers_total", "counter", ("task",), "pictures",
           "Answers that have such a probability, by the matched task."),
    # Matching rate: agreement
    Metric("mqmk_agreement_answers_total", "counter", ("matcher", "result"), "pictures",
           "Sampled answers that were matched again exactly (mqmk), by whether both matched the same task (same, "
           "different). Agreement = same / (same + different)."),
    # Drift
    Metric("mqmk_drift_index", "gauge", ("task", "value"), "index",
           "Population stability index of the latest 500 pictures matched to a task against the held-out pictures, "
           "beyond what chance gives once in a thousand times; of the match `score` and of the `margin`. Above 0.25 "
           "the traffic is of another kind."),
    Metric("mqmk_drift_window_images", "gauge", ("task",), "pictures",
           "Pictures that the drift index of a task is made from."),
)  # fmt: skip

RAY_OWN_METRICS: Final[Mapping[str, str]] = {
    "ray_node_cpu_utilization": "CPU use of a node, percent",
    "ray_node_cpu_count": "CPUs of a node",
    "ray_node_mem_used": "memory in use, bytes",
    "ray_node_mem_total": "memory, bytes",
    "ray_node_gpus_utilization": "GPU use, percent; only where there is one",
    "ray_node_gram_used": "GPU memory in use, megabytes; only where there is a GPU",
    "ray_node_disk_io_read_speed": "bytes read from disk a second",
    "ray_node_disk_io_write_speed": "bytes written to disk a second",
    "ray_object_store_used_memory": "shared memory in use, bytes",
    "ray_component_rss_bytes": "resident memory of Ray's processes, by component",
}
"""What the dashboards read of Ray's own metrics."""
