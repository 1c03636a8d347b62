"""Settings come from four places in a known order, are checked, and every complaint says where and what."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.daemons.daemon import RELEASED

from mqmk.daemon.cli.config import config as config_command
from mqmk.daemon.config import fields as setting_fields
from mqmk.daemon.config import reference_page
from mqmk.daemon.config.fields import (
    KINDS,
    NOTHING,
    Setting,
    all_settings,
    build,
    descriptions,
    display,
    flatten,
    serialize,
)
from mqmk.daemon.config.load import Loaded, conflicts, load
from mqmk.daemon.config.sections import Config, Place, Retry, S3Url, Sha256
from mqmk.daemon.errors import ConfigError
from mqmk.daemon.state_dir import StateDir
from mqmk.deploy.serving.inference import CHOICES
from mqmk.deploy.serving.settings import MatcherName
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.errors import MatchError
from mqmk.matcher.matcher_info import CLASS_MATCHERS
from mqmk.matcher.matchers import MATCHERS, match_images
from mqmk.matcher.pool_files import read_pool

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def loaded(folder: Path, text: str = "", environ: dict[str, str] | None = None, **flags: str) -> Loaded:
    """What these sources lead to; `__` in a flag's name stands for a dot."""
    (folder / "mqmk.yaml").write_text(text)
    return load(None, environ or {}, {name.replace("__", "."): text for name, text in flags.items()}, folder)


def complaint(folder: Path, text: str = "", environ: dict[str, str] | None = None, **flags: str) -> str:
    with pytest.raises(ConfigError) as error:
        loaded(folder, text, environ, **flags)
    return str(error.value)


# --- sources


def test_defaults_work_with_no_file_at_all(folder):
    found = load(None, {}, {}, folder)
    assert found.config == Config(state=found.config.state)
    assert found.file is None
    assert set(found.origins.values()) == {"default"}


def test_a_file_beats_defaults_a_variable_beats_the_file_and_a_flag_beats_all(folder):
    text = "retry: {attempts: 2, first_seconds: 3, max_seconds: 4}"
    variables = {"MQMK_RETRY_FIRST_SECONDS": "3.5", "MQMK_RETRY_MAX_SECONDS": "5"}
    found = loaded(folder, text, variables, retry__max_seconds="6")
    assert found.config.retry == Retry(attempts=2, first_seconds=3.5, max_seconds=6)
    assert found.origins["retry.attempts"] == f"{folder / 'mqmk.yaml'}:1"
    assert found.origins["retry.first_seconds"] == "MQMK_RETRY_FIRST_SECONDS"
    assert found.origins["retry.max_seconds"] == "command line"
    assert found.origins["serve.port"] == "default"


def test_the_file_is_the_named_one_then_that_of_the_variable_then_mqmk_yaml_here(folder):
    for number, name in enumerate(("named.yaml", "of_variable.yaml", "mqmk.yaml"), start=1):
        (folder / name).write_text(f"train:\n  epochs: {number}\n")
    variable = {"MQMK_CONFIG": str(folder / "of_variable.yaml")}
    assert load(folder / "named.yaml", variable, {}, folder).config.train.epochs == 1
    assert load(None, variable, {}, folder).config.train.epochs == 2
    assert load(None, {}, {}, folder).config.train.epochs == 3
    assert load(None, {}, {}, folder).file == folder / "mqmk.yaml"


@pytest.mark.parametrize(("file", "environ", "source"), [
    (Path("absent.yaml"), {}, "--config"), (None, {"MQMK_CONFIG": "absent.yaml"}, "MQMK_CONFIG"),
])  # fmt: skip
def test_a_file_that_was_asked_for_must_exist(folder, file, environ, source):
    with pytest.raises(ConfigError, match=rf"^{source}: expected a YAML file, but .*absent.yaml does not exist"):
        load(file, environ, {}, folder)


def test_nested_sections_and_lists_are_read_from_a_file(folder):
    text = "train:\n  augmentation: {mirror: no}\nevaluate:\n  matchers: [mqmk, cascade]\n"
    config = loaded(folder, text).config
    assert config.train.augmentation.mirror is False
    assert config.evaluate.matchers == ("mqmk", "cascade")


def test_an_empty_section_changes_nothing(folder):
    assert loaded(folder, "train:\n  # epochs: 3\nbucket:\n").config.train == Config().train


def test_an_empty_variable_counts_as_absent(folder):
    found = loaded(folder, environ={"MQMK_SERVE_PORT": "", "MQMK_NO_SUCH_THING": ""})
    assert found.origins["serve.port"] == "default"


def test_variables_that_are_no_settings_are_left_alone(folder):
    (folder / "other.yaml").write_text("")
    environ = {"MQMK_CONFIG": str(folder / "other.yaml"), "MQMK_CRASH_AT": "publish.stored", "OTHER": "1"}
    assert set(load(None, environ, {}, folder).origins.values()) == {"default"}


def test_what_kubernetes_says_about_services_is_no_setting(folder):
    """As set in a pod beside services called mqmk, mqmk-head-svc and mqmk-serve."""
    links = {}
    for name in ("MQMK", "MQMK_HEAD_SVC", "MQMK_SERVE"):
        links |= {
            f"{name}_SERVICE_HOST": "10.96.0.7",
            f"{name}_SERVICE_PORT": "80",
            f"{name}_SERVICE_PORT_PREDICT": "80",
            f"{name}_PORT": "tcp://10.96.0.7:80",
            f"{name}_PORT_80_TCP": "tcp://10.96.0.7:80",
            f"{name}_PORT_80_TCP_PROTO": "tcp",
            f"{name}_PORT_80_TCP_PORT": "80",
            f"{name}_PORT_80_TCP_ADDR": "10.96.0.7",
        }
    assert load(environ=links, folder=folder).config == load(environ={}, folder=folder).config
    assert load(environ=links | {"MQMK_SERVE_PORT": "8001"}, folder=folder).config.serve.port == 8001


@pytest.mark.parametrize("variable", ["MQMK_PORT", "MQMK_SERV_PORT", "MQMK_SERVE_PORTS", "MQMK_SERVICE_HOSTS"])
def test_a_mistyped_variable_is_still_an_error_beside_those_of_kubernetes(folder, variable):
    with pytest.raises(ConfigError, match=f"there is no setting {variable}"):
        load(environ={variable: "8001"}, folder=folder)


def test_every_setting_has_a_variable_of_its_own():
    assert len({key.variable for key in all_settings().values()}) == len(all_settings())


# --- values


@pytest.mark.parametrize(("key", "text", "value"), [
    ("train.learning_rate", "1e-3", 0.001), ("train.learning_rate", "1", 1.0),
    ("limits.pixels", "1_000_000", 1_000_000),
    ("serve.haproxy", "on", True), ("serve.haproxy", "False", False),
    ("train.patience", "none", None), ("train.patience", "null", None), ("train.patience", "4", 4),
    ("ray.address", "none", "none"),
    ("backbone.sha256", "1" * 64, "1" * 64), ("backbone.sha256", "A" * 64, "a" * 64),
    ("evaluate.matchers", "mqmk, sqsk,mqmk", ("mqmk", "sqsk")),
])  # fmt: skip
def test_text_means_the_same_in_a_file_a_variable_and_a_flag(folder, key, text, value):
    section, name = key.split(".")
    for found in (
        loaded(folder, f"{section}:\n  {name}: {text}\n"),
        loaded(folder, environ={all_settings()[key].variable: text}),
        load(None, {}, {key: text}, folder / "nowhere"),
    ):
        assert flatten(found.config)[key] == value
        assert type(flatten(found.config)[key]) is type(value)


@pytest.mark.parametrize(("key", "text"), [
    ("train.epochs", "true"), ("train.epochs", "3.0"), ("train.epochs", "0"), ("train.batch", "none"),
    ("train.epochs", "9" * 5000), ("train.learning_rate", "nan"), ("train.learning_rate", "inf"),
    ("train.balanced", "1"), ("train.balanced", "none"), ("serve.port", "65536"), ("serve.port", "-1"),
    ("gate.accuracy_floor", "1.01"), ("bucket.after_learning", "keeep"), ("evaluate.matchers", "mqmk,perfect"),
    ("evaluate.matchers", "none"), ("backbone.sha256", "abc"), ("mlflow.model", "''"), ("serve.host", '"a\\nb"'),
    ("train.epochs", "[1, 2]"), ("train.epochs", "{a: 1}"), ("train.epochs", "!env X"),
    ("mlflow.model", "!!python/name:os.system"),
])  # fmt: skip
def test_a_wrong_value_is_named_with_its_line_and_what_is_accepted(folder, key, text):
    section, name = key.split(".")
    said = complaint(folder, f"# a comment\n{section}:\n  {name}: {text}\n")
    assert said.startswith(f"{folder / 'mqmk.yaml'}:3: {key}: expected {all_settings()[key].accepted}, got ")
    assert len(said.splitlines()) == 1


def test_a_wrong_variable_or_flag_is_named_with_key_source_and_what_is_accepted(folder):
    said = complaint(folder, environ={"MQMK_TRAIN_EPOCHS": "many"}, log__level="best").splitlines()
    assert said == [
        "MQMK_TRAIN_EPOCHS: train.epochs: expected a whole number of at least 1, or none, got 'many'",
        "command line: log.level: expected one of debug, info, warning, error, got 'best'",
    ]


def test_an_unknown_name_is_answered_with_the_nearest_one_in_the_spelling_of_its_source(folder):
    said = complaint(folder, "train:\n  epoch: 3\n", {"MQMK_BUCKET__URL": "x"}, serve__prt="1").splitlines()
    assert said == [
        f"{folder / 'mqmk.yaml'}:2: there is no setting train.epoch; "
        "did you mean train.epochs (a whole number of at least 1, or none)?",
        "MQMK_BUCKET__URL: there is no setting MQMK_BUCKET__URL; "
        "did you mean MQMK_BUCKET_URL (a folder or a URL, or none)?",
        "command line: there is no setting serve.prt; did you mean serve.port (a whole number from 0 to 65535)?",
    ]


def test_a_name_that_is_near_to_nothing_is_answered_with_the_list(folder):
    assert "there is no setting xyzzy; `mqmk-daemon config` lists them all" in complaint(folder, "xyzzy: {a: 1}")


def test_a_value_for_a_whole_section_is_answered_with_what_the_section_holds(folder):
    said = complaint(folder, "gate: 0.5", gate="1")
    assert said.count("gate is a section, not a setting; it contains accuracy_floor, without_held_out") == 2


def test_a_key_that_is_given_twice_is_refused(folder):
    said = complaint(folder, "train:\n  epochs: 3\n  batch: 8\n  epochs: 4\n")
    assert said == f"{folder / 'mqmk.yaml'}:4: train.epochs is given twice; line 2 already has it"


@pytest.mark.parametrize("text", ["- a\n- b", "just text", "a: [", "a: \t- b: *c", '"\\UFFFFFFFF"', "[" * 5000])
def test_a_file_that_is_no_configuration_is_named(folder, text):
    assert complaint(folder, text).startswith(str(folder / "mqmk.yaml"))


@pytest.mark.parametrize(("flags", "keys"), [
    ({"bucket.poll_seconds": "31"}, ("bucket.poll_seconds", "bucket.max_poll_seconds")),
    ({"retry.first_seconds": "301"}, ("retry.first_seconds", "retry.max_seconds")),
    ({"serve.port": "9109"}, ("serve.port", "metrics.port")),
    ({"ray.address": "none", "ray.workers_per_task": "2"}, ("ray.address", "ray.workers_per_task")),
    ({"serve.replicas": "3", "serve.max_replicas": "2"}, ("serve.replicas", "serve.max_replicas")),
    ({"ray.address": "head:6379", "serve.haproxy": "true"}, ("ray.address", "serve.haproxy")),
    ({"backbone.weights": "/x.safetensors"}, ("backbone.name", "backbone.weights")),
    ({"serve.host": "0.0.0.0"}, ("serve.host", "serve.api_keys")),
])  # fmt: skip
def test_settings_that_do_not_go_together_are_named_with_where_each_came_from(folder, flags, keys):
    with pytest.raises(ConfigError) as error:
        load(None, {}, flags, folder)
    named = ", ".join(f"{key} ({'command line' if key in flags else 'default'})" for key in keys)
    assert str(error.value).startswith(f"{named}: ")


@pytest.mark.parametrize("flags", [
    {"serve.port": "0", "metrics.port": "0"}, {"serve.port": "9109", "serve.enabled": "false"},
    {"serve.host": "0.0.0.0", "serve.open": "true"}, {"serve.host": "0.0.0.0", "serve.api_keys": "/keys"},
])  # fmt: skip
def test_settings_that_do_go_together_are_taken(folder, flags):
    assert load(None, {}, flags, folder).config


# --- paths


def test_relative_paths_start_from_the_file_or_the_current_folder(folder):
    (folder / "settings").mkdir()
    (folder / "settings" / "mine.yaml").write_text("bucket: {url: data}\nstate: {dir: state}\n")
    found = load(Path("settings/mine.yaml"), {"MQMK_STATE_DIR": "here"}, {"serve.api_keys": "~/keys"}, folder).config
    assert found.bucket_url == str(folder / "settings" / "data")
    assert found.state.dir == folder / "here"
    assert found.serve.api_keys == Path("~/keys").expanduser()


def test_a_bucket_url_is_left_as_it_is(folder):
    assert loaded(folder, bucket__url="s3://images/a b").config.bucket_url == "s3://images/a b"


def test_the_state_folder_follows_the_environment(folder):
    assert load(None, {"XDG_STATE_HOME": "/var/s"}, {}, folder).config.state.dir == Path("/var/s/mqmk")
    assert load(None, {"XDG_STATE_HOME": "relative"}, {}, folder).config.state.dir.parts[-3:] == (
        ".local", "state", "mqmk"
    )  # fmt: skip


def test_everything_lies_in_the_state_folder_unless_said_otherwise(folder):
    config = loaded(folder, state__dir="/s").config
    assert config.bucket_url == "/s/bucket"
    assert config.tracking_uri == "sqlite:////s/mlflow/mlflow.db"
    assert loaded(folder, mlflow__tracking_uri="http://m:5000").config.tracking_uri == "http://m:5000"
    assert {path.parts[:2] for path in (config.artifacts_folder, config.ray_head_file)} == {("/", "s")}


def test_the_configuration_and_the_state_files_agree_on_places(folder):
    config, files = loaded(folder, state__dir="/s").config, StateDir(Path("/s"))
    assert config.pools_folder == files.store.folder
    assert config.held_out_folder == files.held_out("x").parent
    assert config.work_folder == files.work("x").parent


@pytest.mark.parametrize(
    "url", ["pools", "/var/pools", "gs://bucket", "s3://key:secret@bucket", "s3://", "s3://b/x?y=z"]
)
def test_the_pool_store_is_a_prefix_on_s3_and_nothing_else(folder, url):
    assert "pools.url: expected a URL s3://bucket/prefix, or none" in complaint(folder, pools__url=url)
    assert loaded(folder, pools__url="s3://bucket/prefix/").config.pools.url == "s3://bucket/prefix"
    assert loaded(folder).config.pools.url is None


def test_a_proxy_on_every_node_needs_an_address_that_every_node_has(folder):
    keys = {"serve__proxies": "every", "serve__open": "true"}
    assert "set serve.host=0.0.0.0" in complaint(folder, serve__host="10.0.0.5", **keys)
    assert loaded(folder, serve__host="0.0.0.0", **keys).config.serve.proxies == "every"


# --- properties

LETTERS = st.characters(categories=["L", "M", "N", "P", "S"]) | st.just(" ")
TEXT = st.text(LETTERS, min_size=1, max_size=20).map(str.strip).filter(lambda text: text.lower() not in NOTHING)
PATHS = TEXT.map(lambda text: Path("/") / text)
PREFIXES = st.from_regex(r"[a-z0-9][a-z0-9.-]{2,20}(/[a-z0-9._-]{1,9}){0,3}", fullmatch=True)
HASHES = st.binary(min_size=32, max_size=32).map(bytes.hex)


def values_of(key: Setting) -> st.SearchStrategy[object]:
    least, most = (key.range.least, key.range.most) if key.range else (0, 2**40)
    most = min(most, 2**40)
    plain: dict[object, st.SearchStrategy[object]] = {
        int: st.integers(int(least), int(most)),
        float: st.floats(least, most),
        bool: st.booleans(),
        str: st.sampled_from(key.choices) if key.choices else TEXT,
        Path: PATHS,
        Place: TEXT.map("s3://".__add__) | PATHS.map(str),
        S3Url: PREFIXES.map("s3://".__add__),
        Sha256: HASHES,
    }
    one = plain[next(sort for sort, kind in KINDS.items() if kind is key.kind)]
    if key.name.endswith(".host"):
        one = st.sampled_from(["127.0.0.1", "localhost", "::1"])
    if key.several:
        one = st.lists(one, min_size=1, unique=True).map(tuple)
    return one | st.none() if key.optional else one


def changed(values: dict[str, object]) -> Config:
    """The defaults with these values, the shorter of two times first."""
    values = {**flatten(Config()), **values}
    for pair in (("bucket.poll_seconds", "bucket.max_poll_seconds"), ("retry.first_seconds", "retry.max_seconds")):
        values |= zip(pair, sorted(values[key] for key in pair), strict=True)
    return build(values)


# A few settings at a time, as drawing all of them takes a second; built in the test, as beartype draws random numbers.
CHANGES = st.lists(st.sampled_from(sorted(all_settings())), max_size=12, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: values_of(all_settings()[name]) for name in names})
)


def as_yaml(config: Config) -> str:
    tree: dict[str, object] = {}
    for name, value in flatten(config).items():
        *sections, last = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(tree, allow_unicode=True)


@given(CHANGES)
@example({})
def test_any_valid_configuration_comes_back_from_yaml_as_it_was(tmp_path_factory, changes):
    config = changed(changes)
    assume(not list(conflicts(config)))
    assert loaded(tmp_path_factory.mktemp("yaml"), as_yaml(config)).config == config


@given(CHANGES)
@example({})
def test_any_valid_configuration_comes_back_from_flags_as_it_was(tmp_path_factory, changes):
    config = changed(changes)
    assume(not list(conflicts(config)))
    flags = {name: serialize(value) for name, value in flatten(config).items()}
    assert load(None, {}, flags, tmp_path_factory.mktemp("flags")).config == config


@given(st.text(alphabet="{}[]:-,&*!|>'\"%@`#? \n\tabtrain.epochs0123", max_size=60))
def test_any_file_is_read_or_refused_with_its_name(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("any")
    try:
        said = str(loaded(folder, text).file)
    except ConfigError as error:
        said = str(error)
    assert str(folder / "mqmk.yaml") in said


# --- declarations


def test_every_setting_says_what_it_is_for():
    assert set(descriptions()) == set(all_settings())
    assert all(text.endswith(".") and len(text) < 140 for text in descriptions().values())


def test_no_description_of_a_learner_setting_hides_the_one_beside_it():
    beside = dict(setting_fields._read_docstrings(Config, ""))
    assert not set(beside) & set(setting_fields.LEARNER_DESCRIPTIONS)


def test_every_number_has_a_range():
    numbers = [key for key in all_settings().values() if key.kind in (KINDS[int], KINDS[float])]
    assert [key.name for key in numbers if key.range is None] == []


def test_every_default_is_accepted():
    for key in all_settings().values():
        assert key.parse(serialize(key.default), Path("/")) == key.default


def test_matcher_names_are_those_that_a_pool_of_the_daemon_can_answer_with():
    vit = load_backbone("embedded")
    pool = read_pool(next((RELEASED / "pools").glob("2-*")), vit.info)[1]
    for name in MATCHERS:
        offered = name in MatcherName.__args__
        assert offered == (name in CHOICES)
        answers = offered and name not in CLASS_MATCHERS  # release 0.1 trained no anchor prompt
        with nullcontext() if answers else pytest.raises(MatchError):
            match_images(name, vit, pool, torch.zeros(1, 3, vit.info.image_size, vit.info.image_size))


def test_a_configuration_cannot_be_changed():
    for entry in fields(Config):
        section = getattr(Config(), entry.name)
        with pytest.raises(FrozenInstanceError):
            setattr(section, fields(section)[0].name, 1)


def test_the_page_about_the_configuration_is_up_to_date():
    assert (ROOT / "docs" / "configuration.md").read_text() == reference_page.page()


def test_the_example_on_the_page_is_a_configuration(folder):
    text = re.search(r"```yaml\n(.*?)```", reference_page.page(), re.DOTALL)
    assert text
    assert loaded(folder, text[1]).config.train.epochs == 10


def test_reading_the_configuration_imports_nothing_heavy_and_costs_less_than_100_ms():
    code = (
        "import sys, time; begun = time.process_time(); from mqmk.daemon.config.load import load; load();"
        "heavy = {'torch', 'ray', 'mlflow', 'fsspec', 'numpy', 'rich', 'click'} & set(sys.modules);"
        "print(heavy or time.process_time() - begun)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    assert min(float(run.stdout) for run in runs) < 0.1


# --- the command


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_prints_every_value_and_where_it_came_from(here):
    (here / "mqmk.yaml").write_text("train:\n  epochs: 3\n")
    options = ["--set", "serve.port=8001", "--state", "s", "--json"]
    document = json.loads(CliRunner(env={"MQMK_RETRY_ATTEMPTS": "2"}).invoke(config_command, options).output)
    settings = document["settings"]
    assert set(settings) == set(all_settings())
    assert settings["train.epochs"] == {"value": 3, "from": f"{here / 'mqmk.yaml'}:2"}
    assert settings["serve.port"] == {"value": 8001, "from": "command line"}
    assert settings["state.dir"] == {"value": str(here / "s"), "from": "command line"}
    assert settings["retry.attempts"] == {"value": 2, "from": "MQMK_RETRY_ATTEMPTS"}
    assert settings["train.patience"] == {"value": None, "from": "default"}
    assert settings["evaluate.matchers"]["value"][-1] == "fused"
    assert document["file"] == str(here / "mqmk.yaml")
    assert document["places"]["ledger_file"] == str(here / "s" / "ledger.sqlite")


def test_the_command_prints_a_table_for_people():
    output = CliRunner().invoke(config_command, ["--set", "train.epochs=17"]).output
    assert all(name in output for name in all_settings())
    assert re.search(r"train\.epochs +17 +command line", output)


def test_a_narrow_terminal_folds_values_but_never_the_name_of_a_setting():
    env = {"FORCE_COLOR": "1", "COLUMNS": "80"}
    output = CliRunner(env=env).invoke(config_command, ["--set", f"bucket.url=/{'x' * 200}"]).output
    lines = re.sub(r"\x1b\[[0-9;]*m", "", output).partition("bucket url:")[0].splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in output
    assert {line.split()[0] for line in lines if line.strip()} >= set(all_settings())


@pytest.mark.parametrize("uri", [
    "postgresql://me:hunter2@db/mlflow", "postgresql://me:hun/hunter2@db/x", "http://h:1/?api_key=hunter2&a=b",
    "postgresql://h/x?user=a&password=hunter2",
])  # fmt: skip
def test_passwords_are_not_printed(uri):
    for options in ([], ["--json"]):
        found = CliRunner().invoke(config_command, ["--set", f"mlflow.tracking_uri={uri}", *options])
        assert found.exit_code == 0
        assert "hunter2" not in found.output
    assert display("s3://bucket/a@b") == "s3://bucket/a@b"


def test_a_flag_without_a_value_is_refused():
    found = CliRunner().invoke(config_command, ["--set", "train.epochs"])
    assert found.exit_code == 2
    assert "expected KEY=VALUE, such as train.epochs=3, got 'train.epochs'" in found.output


def test_a_wrong_setting_ends_the_command():
    error = CliRunner().invoke(config_command, ["--set", "train.epoch=3"]).exception
    assert isinstance(error, ConfigError)
