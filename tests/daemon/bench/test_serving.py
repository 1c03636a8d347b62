"""The benchmark of serving asks real servers, and compares like with like."""

import pytest

from mqmk.daemon.bench.baseline_servers import plain_server
from mqmk.daemon.bench.inputs import publish_random_pool, write_images
from mqmk.daemon.bench.load_client import LoadResult, Request, run_load, summarize
from mqmk.daemon.bench.predictor_process import PredictorSettings, predictors
from mqmk.deploy.serving.errors import ServeError
from mqmk.deploy.serving.settings import ServiceSpec
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.images import decode

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # importing ray.serve


@pytest.fixture(scope="module")
def vit():
    return load_backbone()


@pytest.fixture(scope="module")
def folder(vit, tmp_path_factory):
    path = tmp_path_factory.mktemp("bench")
    publish_random_pool(path / "pools", vit, tasks=3)
    write_images(path / "images", count=4)
    return path


def test_images_are_different_and_of_a_usual_size(folder):
    found = [path.read_bytes() for path in (folder / "images").iterdir()]
    assert len(set(found)) == 4
    assert all(decode(data).size == (640, 480) and 20_000 < len(data) < 200_000 for data in found)


@pytest.mark.parametrize(("kind", "parts"), [("api", {"decode", "queue", "match", "total"}), ("lines", set())])
def test_clients_ask_a_plain_server_and_tell_what_they_saw(folder, kind, parts):
    with plain_server(kind, ServiceSpec(folder / "pools")) as url:
        found = run_load(url, clients=2, seconds=1.0, images=folder / "images")
        assert found.parts_ms.keys() == parts
        assert 0 < found.p50_ms <= found.p99_ms < 1000
        assert found.rate == pytest.approx(2e3 / found.p50_ms, rel=0.6)  # two clients, always one request each
        with pytest.raises(ServeError, match="the clients failed"):
            run_load(f"{url}/nowhere", clients=1, seconds=1.0, images=folder / "images")


def test_the_rate_does_not_depend_on_where_a_batch_ends():
    batches = [Request(begin, begin + 3.0, {}) for begin in (0.0, 3.0, 6.0) for _ in range(30)]
    assert summarize(30, batches, 1.0, 4.0).rate == summarize(30, batches, 2.5, 5.0).rate == 10.0
    with pytest.raises(ServeError, match="no answer"):
        summarize(30, batches, 9.0, 10.0)


def test_the_predictor_is_timed_alone_and_in_several_processes(folder):
    settings = PredictorSettings(folder / "pools", "embedded", "hub", "auto", folder / "images")
    with predictors(settings, processes=2, threads=1, batch=2) as found:
        assert found.rate(0.5) > 1


def load_result(rate: float) -> LoadResult:
    return LoadResult(1, rate, 1e3 / rate, 2e3 / rate, {"decode": 1.0, "queue": 0.5, "match": 5.0, "total": 8.0})


def test_ratios_are_medians_within_rounds():
    from mqmk.daemon.bench.serving import _Rounds

    ours, theirs = iter([load_result(100.0), load_result(10.0), load_result(50.0)]), iter([50.0, 10.0, 50.0])
    found = _Rounds("small", {("ours", 1): lambda: next(ours), ("theirs", 16): lambda: next(theirs)}, 3)
    assert found.ratio(("ours", 1), ("theirs", 16)) == 1.0
    assert [(row.way, row.rate, row.p50_ms) for row in found.rows()] == [("ours", 50.0, 20.0), ("theirs", 50.0, None)]
    (parts,) = found.parts()
    assert (parts.total, parts.answer, parts.outside) == (20.0, 1.5, 12.0)
    assert parts.beyond_the_model == 15.0


def test_the_command_offers_every_part():
    from mqmk.daemon.bench.serving import PARTS
    from mqmk.daemon.cli.bench.serving import PARTS as OFFERED

    assert tuple(PARTS) == OFFERED
