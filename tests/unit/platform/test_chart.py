"""What the chart promises that can be read without helm; `make chart` renders and validates it."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import yaml

from etude.object_rules import OBJECTS
from etude.supervisor import SERVICES
from infra import declared
from infra.helm import check
from services.console.flow import SERVICES as SERVICES_OF_THE_PICTURE
from shared.bus.kafka_cluster import Cluster
from shared.contracts.topics import ACCESS, TOPICS
from shared.sandbox.contract import Limits
from shared.sandbox.pods import objects as pods

CHART = Path(__file__).resolve().parents[3] / "infra" / "helm"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((CHART.parent.parent / "docker-compose.yml").read_text())["services"]
TEMPLATES = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())


def test_every_service_of_the_supervisor_is_deployed():
    deployed = {name: service["module"] for name, service in VALUES["services"].items()}
    for pool in ("evaluation", "serving"):
        assert deployed.pop(f"inference-{pool}") == deployed["inference"]
    assert deployed == dict(SERVICES)


def test_chart_and_compose_file_run_the_same_images_with_the_same_patience():
    for name, service in VALUES["services"].items():
        composed = COMPOSE[name]
        assert composed["image"].startswith(f"etude/{service['image']}:")
        assert composed["stop_grace_period"] == f"{service['graceS']}s"
        assert bool(service.get("ledger")) == ("ETUDE_LEDGER" in composed["environment"])
        assert bool(service.get("jobs")) == ("ETUDE_JOBS" in composed["environment"])


def test_of_services_that_must_not_be_doubled_an_update_starts_the_new_one_after_the_old_one_has_gone():
    alone = {name for name, service in VALUES["services"].items() if service.get("recreate")}
    assert alone == {"trainer", "evaluator"}
    assert all(VALUES["services"][name]["replicas"] == 1 for name in alone)


def test_a_trainer_on_a_gpu_has_the_image_with_torch_for_it():
    trainer = yaml.safe_load((CHART / "values-cluster.yaml").read_text())["services"]["trainer"]
    assert trainer["resources"]["limits"]["nvidia.com/gpu"]
    assert COMPOSE["trainer-gpu"]["image"].startswith(f"etude/{trainer['image']}:")


def test_settings_are_named_as_the_services_know_them():
    known = {setting.name for rows in declared.settings().values() for setting in rows}
    values = "".join(path.read_text() for path in CHART.glob("values*.yaml"))
    named = set(re.findall(r"\bETUDE_[A-Z0-9_]+", TEMPLATES + values))
    assert named
    assert named <= known


def test_values_files_speak_of_services_and_keys_that_exist():
    for path in CHART.glob("values-*.yaml"):
        values = yaml.safe_load(path.read_text())
        assert values.keys() <= VALUES.keys()
        assert values.get("services", {}).keys() <= VALUES["services"].keys()


def test_the_example_of_the_guide_names_values_that_exist_and_ports_of_its_servers():
    def known(given: dict[str, Any], there: dict[str, Any]) -> None:
        assert given.keys() <= there.keys()
        for name, value in given.items():
            if isinstance(value, dict) and there[name]:  # what is empty takes any name
                known(value, there[name])

    guide = (CHART.parent.parent / "docs" / "operations.md").read_text()
    (block,) = re.findall(r"^    images:\n(?:    .*\n)+", guide, re.MULTILINE)
    example = yaml.safe_load(textwrap.dedent(block))
    known(example, VALUES)
    assert example["images"]["registry"].endswith("/")
    for server, url in {"kafka": example["servers"]["bus"], "s3": example["servers"]["objects"]}.items():
        port = (VALUES["network"][server] | example["network"].get(server, {}))["port"]
        assert {int(found) for found in re.findall(r":(\d+)", url)} == {port}


def test_every_installation_that_is_checked_has_its_files_and_every_file_is_checked():
    named = {name for values in check.INSTALLATIONS for name in values.split()}
    assert {f"values-{name}.yaml" for name in named} == {path.name for path in CHART.glob("values-*.yaml")}


def test_with_secrets_of_their_own_each_service_has_that_of_its_own_user():
    given = yaml.safe_load((CHART / "values-access.yaml").read_text())
    assert given["services"].keys() == VALUES["services"].keys()
    user = {name: name if name in ACCESS else name.split("-")[0] for name in VALUES["services"]}
    for name, service in given["services"].items():
        assert service == {"secret": f"etude-{user[name]}"}
    assert given["scaling"]["kafka"]["authenticationRef"] == "etude-scaler"
    assert {"scaler", *user.values()} <= {*ACCESS, *OBJECTS}


def test_an_address_in_the_values_holds_no_password():
    """What is in values is in every history of releases."""
    properties = json.loads((CHART / "values.schema.json").read_text())["properties"]["servers"]["properties"]
    for bus in ("secret", "kafka://a:9092", "kafka://a:9092,b:9092/team-a?tls=1&replication=3"):
        assert re.search(properties["bus"]["pattern"], bus)
        assert bus == "secret" or Cluster.parse(bus)
    for bus in ("", "kafka://etude:hush@a:9092", "kafka://a:9092,etude:hush@b:9092", "kafka://a:9092?x=etude:hush@b"):
        assert not re.search(properties["bus"]["pattern"], bus)
    for objects in ("secret", "s3://etude@s3.example:443?secure=1"):
        assert re.search(properties["objects"]["pattern"], objects)


def test_with_sglang_a_pod_has_the_image_the_memory_and_the_cache_that_the_compose_file_gives():
    gpu = yaml.safe_load((CHART / "values-gpu.yaml").read_text())["services"]["inference"]
    composed = COMPOSE["inference-gpu"]
    assert gpu["engine"] == composed["environment"]["ETUDE_ENGINE"] == "sglang"
    assert composed["image"].startswith(f"etude/{VALUES['services']['inference']['image']}-sglang:")
    assert composed["stop_grace_period"] == f"{gpu['graceS']}s"
    assert gpu["resources"]["limits"]["nvidia.com/gpu"]
    assert gpu["nodeSelector"]
    assert gpu["tolerations"]
    services = (CHART / "templates" / "services.yaml").read_text()
    for name, path in {"shm": "/dev/shm", "kernels": "/kernels"}.items():
        assert f"{{name: {name}, mountPath: {path}}}" in services
        assert f"- {{name: {name}, emptyDir:" in services


def test_the_console_is_told_a_name_for_every_deployment_but_its_own_and_may_ask_all_of_them():
    """Names that lead to every pod, the ones that are not ready too: those are what one wants to see."""
    services, network = ((CHART / "templates" / f"{name}.yaml").read_text() for name in ("services", "network"))
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    (headless,) = (part for part in services.split("\n---\n") if "clusterIP: None" in part)
    assert "name: {{ $root.Release.Name }}-{{ $name }}-pods" in headless
    assert "publishNotReadyAddresses: true" in headless
    assert 'printf "%s-%s-pods:8700" $release $name' in helpers
    assert helpers.index('eq .name "console"') < helpers.index("name: ETUDE_NEIGHBOURS")
    # The last part of a module is what a replica calls itself, and what the console's picture calls it.
    said = {service["module"].rpartition(".")[2] for service in VALUES["services"].values()} - {"console"}
    assert said == set(SERVICES_OF_THE_PICTURE)
    everybody = "podSelector: {matchLabels: {{ toJson $all }}}"
    (asks,) = (part for part in network.split("\n---\n") if "-console-asks" in part)
    (answers,) = (part for part in network.split("\n---\n") if "-answers" in part)
    assert f"- to: [{{{everybody}}}]" in asks
    assert f"  {everybody}\n  policyTypes: [Ingress]" in answers


def test_no_server_and_no_secret_has_a_default():
    assert set(VALUES["servers"].values()) == {""}
    assert not any("secret" in service for service in VALUES["services"].values())
    assert VALUES["scaling"]["kafka"] == {"servers": "", "prefix": "", "authenticationRef": ""}
    assert "kind: Secret" not in TEMPLATES


def test_workers_scale_on_the_topics_and_groups_that_the_services_read():
    text = (CHART / "templates" / "scaling.yaml").read_text()
    pairs = re.findall(r'"topic" "([\w.]+)" "group" "(\w+)"', text)
    assert set(pairs) == {("rollouts.requested", "rollout"), ("rollouts.finished", "reward")}
    for topic, group in pairs:
        assert topic in TOPICS
        assert f'"{group}"' in (CHART.parent.parent / "services" / group / "service.py").read_text()
    query = re.search(r"query: sum\((\w+)\)", text)
    assert query
    assert query[1] in declared.series()


def test_alerts_and_dashboards_are_the_platform_s_own_and_off_until_they_are_asked_for():
    infra = CHART.parent
    assert (CHART / "files" / "alerts.yml").resolve() == infra / "prometheus" / "alerts.yml"
    assert (CHART / "files" / "dashboards").resolve() == infra / "grafana" / "dashboards"
    monitoring = VALUES["monitoring"]
    assert not any(monitoring[name] for name in ("podMonitor", "rules", "dashboards"))
    assert len((infra / "prometheus" / "alerts.yml").read_bytes()) < 500_000
    for path in (CHART / "files" / "dashboards").iterdir():
        assert len(path.read_bytes()) < 900_000, "a ConfigMap holds a MiB"


def test_traces_are_off_and_so_is_the_way_to_a_collector():
    assert VALUES["traces"] == {"share": 0, "endpoint": "", "environment": {}}
    network = (CHART / "templates" / "network.yaml").read_text()
    assert "if .Values.traces.share" in network
    known = (CHART.parent.parent / "docs" / "tracing.md").read_text()
    assert all(name in known for name in re.findall(r"\bOTEL_[A-Z_]+[A-Z]", TEMPLATES))


def test_a_pool_s_pod_is_the_one_that_the_adapter_makes_for_an_image():
    pod = pods.pod("any:1", Limits(), ["/opt/etude"], pods.Cluster(loader="worker:1"))
    helper = (CHART / "templates/_helpers.tpl").read_text().partition('define "etude.sandboxPod"')[2]
    (container,) = pod["containers"]
    assert json.dumps(container["command"]) in helper
    loader = ", ".join(pod["initContainers"][0]["command"])
    assert f"command: [{loader}]" in helper
    for field in (*pod, *container, *(volume["name"] for volume in pod["volumes"])):
        assert re.search(rf"\b{field}\b", helper), field
    for mount in container["volumeMounts"]:
        assert re.search(rf'[" ]{re.escape(mount["mountPath"])}[",}}]', helper), mount
    for number in ("runAsUser", "runAsGroup", "fsGroup"):
        assert f"{number}: {pod['securityContext'][number]}" in helper


def test_workers_may_do_in_the_namespace_of_sandboxes_what_the_adapter_does_and_no_more():
    text = (CHART / "templates/sandboxes.yaml").read_text()
    rules = {
        (rule["apiGroups"][0], rule["resources"][0]): set(rule["verbs"])
        for rule in yaml.safe_load(text.partition("rules:\n")[2].partition("---")[0])
    }
    verbs = {"create", "get", "list", "delete"}
    assert rules == {
        pods.CLAIMS: verbs,
        pods.SANDBOXES: verbs,
        ("", "pods"): {"get"},
        ("", "pods/exec"): {"create", "get"},
    }
