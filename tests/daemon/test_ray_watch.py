"""When a Ray head that is not well is restarted, and what counts as an answer; the real head is in test_ray_head."""

import socket

from mqmk.daemon.ray_probe import speaks_grpc, speaks_http
from mqmk.daemon.ray_watch import PROXY_SECONDS, SILENCE_SECONDS, HeadHealth, Part, Verdict, Watch, judge


def test_only_lasting_silence_leads_to_a_restart():
    silent = HeadHealth(silent=(Part.GCS, Part.PROXY))
    watch, verdict = judge(Watch(), silent, now=100.0)
    assert verdict is Verdict.WAIT
    assert judge(watch, silent, now=100.0 + SILENCE_SECONDS)[1] is Verdict.RESTART
    healed, verdict = judge(watch, HeadHealth(), now=110.0)
    assert (healed, verdict) == (Watch(), Verdict.WELL)
    assert judge(healed, silent, now=200.0)[1] is Verdict.WAIT


def test_serve_gets_more_time_to_replace_its_proxy_than_a_silent_raylet():
    silent = HeadHealth(silent=(Part.PROXY,))
    watch, _ = judge(Watch(), silent, now=0.0)
    assert judge(watch, silent, now=PROXY_SECONDS - 1)[1] is Verdict.WAIT
    assert judge(watch, silent, now=PROXY_SECONDS)[1] is Verdict.RESTART


def test_health_is_said_in_a_sentence():
    assert str(HeadHealth()) == "Ray is well"
    assert str(HeadHealth((Part.RAYLET,), (Part.PROXY,))) == "raylet is dead, Serve proxy does not answer"


def test_a_listener_that_says_nothing_does_not_count_as_answering():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert not speaks_grpc(port, timeout=0.2)
        assert not speaks_http(port, timeout=0.2)
