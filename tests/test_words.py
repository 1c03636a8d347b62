"""One word for one thing: names that were replaced do not come back.

Each pattern is an identifier, an event, a metric or a help text that has a better name now; the comment above a group
says what to write instead. Ordinary English is not listed.
"""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".css", ".html", ".js", ".json", ".md", ".py", ".service", ".sh", ".tmpl", ".toml", ".yaml", ".yml"}
HISTORY = (
    "CHANGELOG.md",
    "docs/decisions/",
    "tests/daemon/releases/",
    "tests/test_words.py",
    "daemon/ledger/event_names.py",  # events as release 0.1 stored them
    "tests/daemon/test_ledger.py",
)
"""What speaks of earlier versions, or is made by them."""

PATTERNS = (
    # image
    r"\b[Pp]ictures?\b(?!>| frame\b)",  # an HTML element, a class of Quick, Draw!
    r"_pictures?\b|\bpictures?_",
    # PredictionResult, PredictOptions, Predictor, predict_files
    r"\bTold\b|\ball_told\b|\btold\.py\b",
    r"\bWishes\b|\bwishes\b",
    r"\bOracle\b",
    # JobRunner, local_runner
    r"\b[Ww]orkshop\b|\blocal_workshop\b",
    # Runtime, NoRuntime, runtime_for, reconcile
    r"\bGround\b|\bNoGround\b|\bNoRay\b|\bground_for\b|\.tend\(|\bdef tend\b",
    # OperatorCommands.apply_pending
    r"\bOperators\b|\bobey\(",
    # enqueue_command, resolve_command, pending_commands, forget_fingerprint, record_scan, append_event, ...
    r"\bledger\.(ask|answer|pending|overlook|see|sighted|note|mark|move|remember|recall)\(",
    # message
    r"\bhealth\.says\b",
    # retry.decide, Retry, Quarantine, is_infrastructure_error
    r"\bTryAgain\b|\bGiveUp\b|\b_of_the_machine\b|\bpipeline[./]verdicts\b|\bretry import [\w, ]*\bjudge\b",
    # collect_results, mirror, confirm_rollout, clean_up
    r"\btake_in\b|\bcopy_out\b|\.roll_out\(|\bdef roll_out\b|\.tidy\(|\bdef tidy\b",
    # poll, Progress, has_capacity, discard
    r"\.news\(|\bdef news\b|\bReported\b|\broom_for\b|\b_bury\b|\b_heard_from\b",
    # give_up_reason, run_until(call, give_up)
    r"_hopeless\b|\bhopeless\b",
    # connect, reconnect, disconnect, start_services
    r"\b_join_again\b|\b_failed_to_join\b|\b_equip\b",
    # Coordinator, refresh_credentials, set_credentials
    r"\bDesk\b|\bdesk\.py\b|\b_remind\b|\.remind\b|\bdef remind\b",
    # AuthMiddleware, PUBLIC_PATHS, DRAIN_FACTOR
    r"\b[Dd]oorman\b|\b_PATIENCE\b|\b_OPEN\b",
    # lower_thread_priority
    r"\bmaking_way\b|\bmake_way\b",
    # MetricsMiddleware, set_matcher, set_timings
    r"\brequest_tally\b|\bRequestTally\b|\bnote_matcher\b|\bnote_answers\b",
    # LivePool, LoadedPool, poll, Rejection, is_current, Throttle
    r"\bPoolHolder\b|\bpool_holder\b|\bHeld\(|\bclass Held\b|\bRefusal\b|\bcaught_up\b|\b_Breather\b",
    r"\b(bucket|holder|pool|scanner)\.look\(",
    # RequestMetrics, DriftState, delta, totals
    r"\bMeasures\b|\bclass Followed\b|\bFollowed\(|\b_grown\b",
    # OtherReplicas, broadcast_feedback, count_unknown_id, UnknownRequestIdError
    r"\bclass Elsewhere\b|\bElsewhere\(|\b_ask_others\b|\.missed\(|\bNotRememberedError\b",
    # matching_summary, summary_line
    r"\bGlance\b|\bglance\(|\bimport glance\b|\bin_words\b",
    # smoke_test, SmokeTest.error, run_forked
    r"\bfresh_answers?\b|\bFreshAnswers\b|\b_in_a_fork\b",
    # configure_client, transfer_timeout
    r"\bbe_quiet_and_quick\b|\bpatience\(\)",
    # artifacts_missing, version_number_taken, require_next, install_pool
    r"\bfiles_gone\b|\bnumber_gone\b|\bexpect_next\b|\bplace_pool\b",
    # train_distributed, ProcessGroup, SINGLE_PROCESS, Mailbox, my_parts, all_reduce_grads
    r"\blearn_together\b|\bclass Team\b|\bimport [\w, ]*\bTeam\b|\bTeam\(|\bALONE\b|\bInbox\b",
    r"\bteam\.mine\b|\badd_up\b",
    # Histogram, TaskProgress, seconds_since_event
    r"\bSpread\b|\b_Course\b|\bquiet\(\)",
    # redact, display, serialize, build, flatten
    r"\bfrom mqmk\.daemon\.(config\.fields|redaction) import [\w, ]*\b(hidden|shown|written|built|flat)\b",
    # write_owner, LockOwner, lock_owner
    r"\block\.say\b|\bclass Holder\b|\bholder_of\b",
    # scan, classify, is_complete, is_already_learned, read_manifest, has_settled, reported, changed
    r"\b_judged\b|\b_keeps_its_promise\b|\bis_leftover\b|\bpromised\(|\bis_over\b|\b_Stillness\b|_stirred\b",
    # task.retry_scheduled, task.duplicate, task.cleanup_skipped, bucket.folder_skipped, loop.failed
    r"\btask\.(will-retry|seen-again|not-tidied)\b|\bbucket\.passed-over\b|\bpass\.failed\b",
    # serve.redeploy, ray.start_retried, replica.heartbeat_lost
    r"\bserve\.deploy_again\b|\bray\.start_again\b|\breport_lost\b",
    # mqmk_task_last_event_age_seconds, mqmk_replica_pool_rejected, mqmk_task_time_to_serving_seconds
    r"\bmqmk_(task_quiet_seconds|replica_refusing|shard_to_served_seconds)\b",
    # is_correct
    r"\brightly\b",
    # MatchInput, match_queries, match_images, with_own_query, to_match, top_two
    r"\bScene\b|\b_decided\b|\b_winners\b|\bdef _answered\b",
    # TaskTrainer
    r"\bclass Learning\b|\bLearning\(",
    # fit_ridge, merge_keys
    r"\bdef (solved|grouped)\b|\b(solved|grouped)\(",
    # Criterion, PlainStatisticsAccumulator, drop_patches, QueryTable.empty, HeldOut.empty
    r"\bclass Bar\b|\bBar\(|\bPlainCounting\b|\bsome_patches\b|\bfirst_table\b|\bHeldOut\.nothing\b",
    # project_2d, set_lr, to_json, NO_RUNNER_UP, rng
    r"\bon_a_plane\b|\bset_rate\b|\bas_document\b|\bNOBODY\b|\b_?[Dd]ice\b",
    # verbs, not participles
    r"\bdef _(understood|checked|written|opened|allowed|parsed|picked|named|classified|smoothed|fitted)\b",
    # idiomatic help and errors
    r"Is it fine, what is it doing|Say what is in |Count right answers|while the daemon works",
    r"written down; the daemon acts|only writes it down|no moment of rest|\bmend the shards\b|what serves goes on",
)


def tracked_text() -> list[tuple[str, list[str]]]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.split("\0") if Path(name).suffix in SUFFIXES or name == "Makefile"]
    paths = [(name, ROOT / name) for name in names if not name.startswith(HISTORY)]
    return [(name, path.read_text().splitlines()) for name, path in paths if path.is_file() and not path.is_symlink()]


def test_replaced_names_do_not_come_back() -> None:
    replaced = re.compile("|".join(f"(?:{pattern})" for pattern in PATTERNS))
    found = [
        f"{name}:{number}: {match[0].strip()}"
        for name, lines in tracked_text()
        for number, line in enumerate(lines, 1)
        for match in replaced.finditer(line)
    ]
    assert not found, f"{len(found)} replaced names:\n" + "\n".join(found)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_does_not_match_everything(pattern: str) -> None:
    assert not re.search(
        pattern, "from mqmk.matcher.pool import PromptPool  # the image of a task is held out, or open"
    )
