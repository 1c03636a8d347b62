"""The number of replicas follows the load, on real Ray Serve; takes two minutes, so only `make swap-test` runs it."""

import os
import time

import pytest
from support.serving.fingerprints import marked_pool, publish
from support.serving.load import Load
from support.serving.running_service import running_service, until

from mqmk.matcher.backbone import load_backbone

FULL = os.environ.get("MQMK_SWAP_TEST") == "full"


@pytest.mark.skipif(not FULL, reason="takes two minutes: `make swap-test` runs it")
def test_replicas_come_with_the_load_hold_current_when_they_are_ready_and_go_with_it(tmp_path):
    pools, vit = tmp_path / "pools", load_backbone()
    publish(pools, marked_pool(vit, 1), 1)
    scaling = {"max_replicas": 2, "target_requests": 1.0, "scale_up_seconds": 1.0, "scale_down_seconds": 5.0}
    scaling |= {"num_gpus": 0.5}  # so far as Ray counts them: two replicas fit on one
    with running_service(pools, replicas=1, **scaling) as running:
        first = running.reports[0].replica_id
        began = time.monotonic()
        with Load(running.url, clients=8) as load:
            publish(pools, marked_pool(vit, 2), 2)  # before the second replica is there
            until(lambda: len(running.reports) == 2, 180, "a second replica is ready")
            came = time.monotonic() - began
            assert [each.pool_version for each in running.reports if each.replica_id != first] == [2]
            time.sleep(3)
        assert not [sample for sample in load.samples if sample.error]
        assert {sample.version for sample in load.samples} == {1, 2}
        went = until(lambda: len(running.reports) == 1, 180, "one replica is left")
        assert running.post("/pool", b"")["status"] == 405  # it still answers
    print(f"\na second replica was ready {came:.0f} s after the load began and gone {went:.0f} s after it ended")
