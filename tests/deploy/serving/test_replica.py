"""What a replica does between requests, without Ray Serve around it."""

from types import SimpleNamespace

import pytest

from mqmk.matcher.errors import PoolError

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # importing ray.serve


@pytest.mark.parametrize(("rejection", "asked"), [("pointer: access denied", 1), (None, 0)])
def test_a_replica_that_gets_no_pool_asks_for_credentials_again(rejection, asked):
    from mqmk.deploy.serving.replica import Replica

    renewed, beats = [], []

    def renew() -> None:
        renewed.append(1)
        raise PoolError("the store is not back yet")

    replica = Replica.__new__(Replica)
    replica._live_pool = SimpleNamespace(poll=lambda: None, last_rejection=rejection)
    replica._renewal = SimpleNamespace(renew=renew)
    replica._heartbeat = SimpleNamespace(run_now=lambda: beats.append(1))
    replica._poll()
    assert (len(renewed), len(beats)) == (asked, 1), "whatever comes of it, the daemon hears what is loaded"
