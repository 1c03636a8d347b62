"""What an operator installs on Kubernetes: known to its schema, rendered by Helm, and of settings that exist."""

import json
import re
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from mqmk.daemon.config.load import load
from mqmk.daemon.config.sections import Config

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
CHART = DEPLOY / "helm" / "mqmk-daemon"
KEYS = {"secrets": {"apiKeys": "0" * 64}}


def settings(file: Path) -> Config:
    """What the program makes of a file; ConfigError names every setting that does not exist."""
    return load(file, environ={"XDG_STATE_HOME": "/nowhere"}).config


def documents(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each]


MANIFESTS = {path.name: documents(path.read_text()) for path in sorted((DEPLOY / "kuberay").glob("*.yaml"))}


def validate(document: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate==1.37.0")
    for kubernetes in ("1.25", "1.37"):
        validator.validate(document, kubernetes, strict=True)


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of a RayCluster, which the validator does not know itself."""
    spec = document["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    named = [group["template"]["metadata"] | {"name": "pod"} for group in groups]
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": name, "spec": group["template"]["spec"]}
            for name, group in zip(named, groups, strict=True)]  # fmt: skip


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_knows_every_field_of_a_manifest(name: str) -> None:
    for document in MANIFESTS[name]:
        for each in pods(document) if document["kind"] == "RayCluster" else [document]:
            validate(each)


def test_the_daemon_shares_sockets_memory_and_the_state_with_its_ray_node_and_the_state_with_no_other() -> None:
    (cluster,) = MANIFESTS["raycluster.yaml"]
    head, worker = pods(cluster)
    mounts = [{mount["mountPath"] for mount in each["volumeMounts"]} for each in head["spec"]["containers"]]
    assert {"/tmp/ray", "/dev/shm", "/var/lib/mqmk"} <= mounts[0] & mounts[1]
    assert "/var/lib/mqmk" not in {mount["mountPath"] for mount in worker["spec"]["containers"][0]["volumeMounts"]}
    assert "persistentVolumeClaim" not in json.dumps(worker)
    assert MANIFESTS["pvc.yaml"][0]["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert cluster["spec"]["rayVersion"] == version("ray")


def test_no_pod_gets_service_variables_that_look_like_settings() -> None:
    (cluster,) = MANIFESTS["raycluster.yaml"]
    specs = [pod["spec"] for pod in pods(cluster)]
    specs += [rendered(KEYS)["deployment.yaml"][0]["spec"]["template"]["spec"]]
    assert [spec["enableServiceLinks"] for spec in specs] == [False] * 3


def probe(container: dict[str, Any], kind: str) -> tuple[str, str]:
    asked = container[f"{kind}Probe"]["httpGet"]
    return asked["path"], asked["port"]


def test_a_loop_that_hangs_is_restarted_and_nobody_is_sent_to_what_cannot_answer() -> None:
    (cluster,) = MANIFESTS["raycluster.yaml"]
    beside_ray = pods(cluster)[0]["spec"]["containers"][1]
    alone = rendered(KEYS)["deployment.yaml"][0]["spec"]["template"]["spec"]["containers"][0]
    for kind in ("startup", "liveness"):
        assert probe(beside_ray, kind) == ("/healthz", "daemon-metrics")
        assert probe(alone, kind) == ("/healthz", "metrics")
    assert probe(alone, "readiness") == ("/readyz", "predict")


def test_other_api_keys_roll_the_pod_of_the_chart() -> None:
    """By the annotation alone: what else of a template changes, Kubernetes sees for itself."""
    notes = []
    for key in ("0", "1"):
        values = {"secrets": {"apiKeys": key * 64}}
        notes.append(rendered(values)["deployment.yaml"][0]["spec"]["template"]["metadata"]["annotations"])
    assert notes[0]["checksum/secret"] != notes[1]["checksum/secret"]
    assert notes[0]["checksum/config"] == notes[1]["checksum/config"]


def test_every_name_that_the_manifests_refer_to_is_defined() -> None:
    (cluster,) = MANIFESTS["raycluster.yaml"]
    defined = {each["metadata"]["name"] for each in chain.from_iterable(MANIFESTS.values())}
    text = json.dumps(cluster)
    used = re.findall(r'"(?:claimName|secretName)": "([^"]+)"', text)
    used += re.findall(r'"(?:secretRef|configMap|secretKeyRef)": \{"name": "([^"]+)"', text)
    assert used and set(used) <= defined


def test_the_manifests_name_settings_that_exist(tmp_path: Path) -> None:
    (tmp_path / "mqmk.yaml").write_text(MANIFESTS["config.yaml"][0]["data"]["mqmk.yaml"])
    config = settings(tmp_path / "mqmk.yaml")
    (cluster,) = MANIFESTS["raycluster.yaml"]
    assert config.ray.address == f"{cluster['metadata']['name']}-head-svc:6379"
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for each in head for port in each["ports"]}
    assert (ports["predict"], ports["daemon-metrics"]) == (config.serve.port, config.metrics.port)
    environ = {each["name"]: each.get("value") for each in head[1]["env"]}
    assert environ["MQMK_STATE_DIR"] == str(config.state.dir), "a variable wins over the file"
    assert config.serve.api_keys and not config.serve.open
    assert config.pools.url, "replicas on other machines do not see the state directory"


def rendered(values: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    helm = pytest.importorskip("helm_python", reason="pip install helm-python-sdk==0.2.2")
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        found = chart.render(values=values, name="release", namespace="mqmk")
    return {Path(name).name: documents(text) for name, text in found.items() if name.endswith(".yaml")}


VALUES = {
    "least": KEYS,
    "most": {
        "image": {"repository": "registry.example/mqmk-daemon", "digest": f"sha256:{'0' * 64}"},
        "imagePullSecrets": [{"name": "registry"}],
        "secrets": {"existingApiKeys": "keys", "existingEnvironment": "bucket"},
        "persistence": {"existingClaim": "claim"},
        "settings": {"bucket": {"url": "s3://other"}, "train": {"epochs": 3}, "serve": {"host": "127.0.0.1"}},
        "networkPolicy": {"clients": [], "monitoring": []},
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    },
}


def test_helm_has_nothing_to_say_about_the_chart() -> None:
    helm = pytest.importorskip("helm_python", reason="pip install helm-python-sdk==0.2.2")
    report = helm.chart.lint(CHART, KEYS, strict=True)
    assert report["errors"] in (None, [])
    assert [each for each in report["messages"] or [] if each["severity"] >= 2] == []


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_kubernetes_knows_every_field_of_what_the_chart_renders(values: dict[str, Any]) -> None:
    for document in chain.from_iterable(rendered(values).values()):
        validate(document)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_chart_names_settings_that_exist_and_keeps_its_own(values: dict[str, Any], tmp_path: Path) -> None:
    found = rendered(values)
    (tmp_path / "mqmk.yaml").write_text(found["config.yaml"][0]["data"]["mqmk.yaml"])
    config = settings(tmp_path / "mqmk.yaml")
    container = found["deployment.yaml"][0]["spec"]["template"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (ports["predict"], ports["metrics"]) == (config.serve.port, config.metrics.port)
    assert config.serve.host == "0.0.0.0" and config.serve.api_keys and not config.serve.open
    assert {"MQMK_STATE_DIR": str(config.state.dir)} == {each["name"]: each["value"] for each in container["env"]}
    assert container["resources"]["limits"]["memory"]


def test_without_api_keys_the_chart_is_refused_and_says_what_to_do() -> None:
    helm = pytest.importorskip("helm_python", reason="pip install helm-python-sdk==0.2.2")
    with pytest.raises(helm.HelmError, match=r"secrets\.apiKeys or secrets\.existingApiKeys is needed"):
        rendered({})


def test_the_chart_refuses_a_moving_tag_and_values_that_it_does_not_know() -> None:
    helm = pytest.importorskip("helm_python", reason="pip install helm-python-sdk==0.2.2")
    for wrong in ({"image": {"repository": "x", "tag": "latest"}}, {"replicas": 3}):
        with pytest.raises(helm.HelmError):
            rendered(KEYS | wrong)


def test_an_empty_list_of_clients_lets_nobody_in() -> None:
    (policy,) = rendered(VALUES["most"])["networkpolicy.yaml"]
    assert not policy["spec"]["ingress"] and "Ingress" in policy["spec"]["policyTypes"]
    (policy,) = rendered(VALUES["least"])["networkpolicy.yaml"]
    assert [rule["ports"][0]["port"] for rule in policy["spec"]["ingress"]] == ["predict", "metrics"]
    assert all(rule["from"] for rule in policy["spec"]["ingress"])


def test_every_image_is_the_one_of_this_release() -> None:
    (cluster,) = MANIFESTS["raycluster.yaml"]
    used = {container["image"] for pod in pods(cluster) for container in pod["spec"]["containers"]}
    assert used == {f"mqmk-daemon:{version('mqmk-daemon')}"}
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == version("mqmk-daemon")


def test_no_service_is_open_to_the_world_and_no_file_holds_a_secret() -> None:
    services = [each for each in chain.from_iterable(MANIFESTS.values()) if each["kind"] == "Service"]
    assert services and all(each["spec"].get("type", "ClusterIP") == "ClusterIP" for each in services)
    for document in MANIFESTS["secret.example.yaml"]:
        for name, value in document["stringData"].items():
            assert value.split()[-1] == "replace-me" or name in ("AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"), name
