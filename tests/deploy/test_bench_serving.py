"""The benchmark of serving asks real servers, and compares like with like."""

import pytest

from mqmk.deploy.bench_clients import Asked, Request, ask, summary
from mqmk.deploy.bench_inputs import publish_random_pool, write_pictures
from mqmk.deploy.bench_plain import plain_server
from mqmk.deploy.bench_predictor import PredictorSettings, predictors
from mqmk.deploy.errors import ServeError
from mqmk.deploy.settings import ServeSettings
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
    write_pictures(path / "pictures", count=4)
    return path


def test_pictures_are_different_and_of_a_usual_size(folder):
    found = [path.read_bytes() for path in (folder / "pictures").iterdir()]
    assert len(set(found)) == 4
    assert all(decode(data).size == (640, 480) and 20_000 < len(data) < 200_000 for data in found)


@pytest.mark.parametrize(("kind", "parts"), [("api", {"decode", "queue", "match", "total"}), ("lines", set())])
def test_clients_ask_a_plain_server_and_tell_what_they_saw(folder, kind, parts):
    with plain_server(kind, ServeSettings(folder / "pools")) as url:
        found = ask(url, clients=2, seconds=1.0, pictures=folder / "pictures")
        assert found.parts_ms.keys() == parts
        assert 0 < found.p50_ms <= found.p99_ms < 1000
        assert found.rate == pytest.approx(2e3 / found.p50_ms, rel=0.6)  # two clients, always one request each
        with pytest.raises(ServeError, match="gave up"):
            ask(f"{url}/nowhere", clients=1, seconds=1.0, pictures=folder / "pictures")


def test_the_rate_does_not_depend_on_where_a_batch_ends():
    batches = [Request(begin, begin + 3.0, {}) for begin in (0.0, 3.0, 6.0) for _ in range(30)]
    assert summary(30, batches, 1.0, 4.0).rate == summary(30, batches, 2.5, 5.0).rate == 10.0
    with pytest.raises(ServeError, match="no answer"):
        summary(30, batches, 9.0, 10.0)


def test_the_predictor_is_timed_alone_and_in_several_processes(folder):
    settings = PredictorSettings(folder / "pools", "embedded", "hub", "auto", folder / "pictures")
    with predictors(settings, processes=2, threads=1, batch=2) as found:
        assert found.rate(0.5) > 1


def asked(rate: float) -> Asked:
    return Asked(1, rate, 1e3 / rate, 2e3 / rate, {"decode": 1.0, "queue": 0.5, "match": 5.0, "total": 8.0})


def test_ratios_are_medians_within_rounds():
    from mqmk.deploy.bench_serving import _Rounds

    ours, theirs = iter([asked(100.0), asked(10.0), asked(50.0)]), iter([50.0, 10.0, 50.0])
    found = _Rounds("small", {("ours", 1): lambda: next(ours), ("theirs", 16): lambda: next(theirs)}, 3)
    assert found.ratio(("ours", 1), ("theirs", 16)) == 1.0
    assert [(row.way, row.rate, row.p50_ms) for row in found.rows()] == [("ours", 50.0, 20.0), ("theirs", 50.0, None)]
    (parts,) = found.parts()
    assert (parts.total, parts.answer, parts.outside) == (20.0, 1.5, 12.0)
    assert parts.beyond_the_model == 15.0


def test_the_command_offers_every_part():
    from mqmk.daemon.commands.bench_serving import PARTS as OFFERED
    from mqmk.deploy.bench_serving import PARTS

    assert tuple(PARTS) == OFFERED
