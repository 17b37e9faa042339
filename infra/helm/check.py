"""Lints the chart, renders it for every kind of installation, and validates the result against Kubernetes' own schemas.

    python -m infra.helm.check

Needs Go: helm and kubeconform are built from their modules into `~/.cache/etude/tools` (minutes, once). Kubernetes' schemas
come from a Python package, those of KEDA and the Prometheus operator from their modules: nothing is fetched while the
check runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from infra.servers import CACHE, alone
from infra.setup import uv

CHART = Path(__file__).resolve().parent
TOOLS = CACHE / "tools"
GO_TOOLS = {
    "helm": "helm.sh/helm/v3/cmd/helm@v3.18.6",
    "kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform@v0.7.0",
}
CUSTOM = {  # kind -> module and path of its definition
    "scaledobject-keda-v1alpha1": (
        "github.com/kedacore/keda/v2@v2.17.2",
        "config/crd/bases/keda.sh_scaledobjects.yaml",
    ),
    "podmonitor-monitoring-v1": (
        "github.com/prometheus-operator/prometheus-operator@v0.85.0",
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
    ),
    "prometheusrule-monitoring-v1": (
        "github.com/prometheus-operator/prometheus-operator@v0.85.0",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
    "sandboxtemplate-extensions-v1beta1": (
        "sigs.k8s.io/agent-sandbox@v0.5.6",
        "k8s/crds/extensions.agents.x-k8s.io_sandboxtemplates.yaml",
    ),
    "sandboxwarmpool-extensions-v1beta1": (
        "sigs.k8s.io/agent-sandbox@v0.5.6",
        "k8s/crds/extensions.agents.x-k8s.io_sandboxwarmpools.yaml",
    ),
}
SCHEMAS = "kubernetes-validate==1.37.0"
VERSIONS = ("1.31.0", "1.37.0")  # of Kubernetes
# An installation's own part: what values.yaml leaves open on purpose.
BUS = "servers.bus=kafka://kafka-0.kafka:9092\\,kafka-1.kafka:9092"
S3 = "servers.objects=s3://etude@s3.example:443?secure=1"
OBJECTS = (S3, "network.s3.port=443")
SCALING = "scaling.kafka.servers=kafka-0.kafka:9092\\,kafka-1.kafka:9092"
WATCHING = (  # that is off in every values file
    "monitoring.rules=true",
    "monitoring.dashboards=true",
    "monitoring.labels.release=prometheus",
    "traces.share=1",
    "traces.endpoint=http://collector.monitoring:4318",
    "traces.environment.OTEL_EXPORTER_OTLP_COMPRESSION=gzip",
)
PODS = (  # sandboxes in pods, off in every values file
    "sandboxes.kubernetes.enabled=true",
    "sandboxes.kubernetes.runtimeClass=kata",
    "sandboxes.kubernetes.image=pool:py",
    "sandboxes.kubernetes.pools.py.image=registry.example/py:3.12",
    "sandboxes.kubernetes.pools.py.warm=1",
    "sandboxes.kubernetes.pools.py.memoryMb=2048",
    "sandboxes.kubernetes.pools.py.diskMb=4096",
)
SERVING = ("services.inference-serving.replicas=1", "network.serving.from[0].podSelector.matchLabels.app=proxy")
INSTALLATIONS: dict[str, tuple[str, ...]] = {  # values files, by their names, and what an installation adds
    "node": (BUS, *OBJECTS),
    "cluster": (BUS, *OBJECTS, SCALING, *SERVING),
    "cluster gpu": (BUS, *OBJECTS, SCALING),
    "cluster gpu access": (SCALING,),
    "node access": PODS,
    "cluster access": (SCALING, "scaling.kafka.prefix=team-a", *WATCHING),
}
REFUSED = {  # what is missing or wrong, and the word by which the chart must say so
    (): "servers",
    (BUS,): "objects",
    (BUS.replace("//", "//etude:hush@"), *OBJECTS): "bus",
    (BUS, S3): "network.s3.port",
    (BUS.replace("9092", "9093"), *OBJECTS): "network.kafka.port",
    (BUS, *OBJECTS, "scaling.enabled=true"): "scaling.kafka.servers",
    (BUS, *OBJECTS, "traces.share=1"): "traces.endpoint",
}


def run(*command: str | Path, quiet: bool = True) -> str:
    """Standard output. Ends the program with the command's own words when it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    if not quiet:
        print(done.stdout.strip())
    return done.stdout


def build_tools() -> None:
    if not shutil.which("go"):
        sys.exit(f"go is not on the PATH; install Go 1.24 or newer, or put helm and kubeconform into {TOOLS}")
    TOOLS.mkdir(parents=True, exist_ok=True)
    for name, module in GO_TOOLS.items():
        if not (TOOLS / name).exists():
            print(f"building {module}", flush=True)
            environment = {**os.environ, "GOBIN": str(TOOLS), "GOFLAGS": "-trimpath"}
            subprocess.run(["go", "install", "-ldflags", "-s -w", module], check=True, env=environment)


def schemas() -> Path:
    """A directory of JSON schemas: Kubernetes' own, by version, and those of `CUSTOM`, read from resource definitions."""
    package, folder = TOOLS / "kubernetes", TOOLS / "schemas"
    if not package.exists():
        run(*uv(), "pip", "install", "-q", "--no-deps", "--target", package, SCHEMAS)
    for version in VERSIONS:
        target = folder / f"v{version}"
        if not target.exists():
            copied = folder / f"{version}.part"
            copied.mkdir(parents=True, exist_ok=True)
            source = package / "kubernetes_validate" / "kubernetes-json-schema" / f"v{version}-local-strict"
            for path in source.glob("*.json"):  # they name themselves, and each other, by places of a server
                schema = json.loads(path.read_text().replace('"/api/_definitions.json', '"_definitions.json'))
                schema.pop("$id", None)
                (copied / path.name).write_text(json.dumps(schema))
            copied.rename(target)
    for name, (module, path) in CUSTOM.items():
        target = folder / "custom" / f"{name}.json"
        if not target.exists():
            source = Path(json.loads(run("go", "mod", "download", "-json", module))["Dir"]) / path
            definition = yaml.safe_load(source.read_text())
            target.parent.mkdir(exist_ok=True)
            target.write_text(json.dumps(closed(definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"])))
    return folder


def closed(schema: Any) -> Any:
    """The schema of a custom resource, with fields that it does not name refused, as Kubernetes' strict schemas do."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    open_ends = ("additionalProperties", "x-kubernetes-preserve-unknown-fields")
    if (
        isinstance(schema.get("properties"), dict)
        and schema.get("type") == "object"
        and not schema.keys() & set(open_ends)
    ):
        inner["additionalProperties"] = False
    return inner


def arguments(values: str, own: tuple[str, ...]) -> list[str]:
    files = (part for name in values.split() for part in ("-f", str(CHART / f"values-{name}.yaml")))
    settings = (
        part
        for one in own
        for part in (("--set" if one.endswith(("=true", "=1", "Mb=2048", "Mb=4096")) else "--set-string"), one)
    )
    # Asked of no cluster, a helm that is built from its module takes it for an ancient one.
    return [*files, *settings, "--kube-version", VERSIONS[0]]


def render(values: str, own: tuple[str, ...]) -> str:
    run(TOOLS / "helm", "lint", "--strict", CHART, *arguments(values, own))
    return run(TOOLS / "helm", "template", "etude", CHART, *arguments(values, own))


def refuses_what_is_missing() -> None:
    for own, word in REFUSED.items():
        command = [TOOLS / "helm", "template", "etude", CHART, *arguments("", own)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0 or word not in done.stderr:
            sys.exit(f"with {own} the chart must say what is wrong with {word}; it said: {done.stderr or 'nothing'}")


def keeps_secrets_apart(manifest: str) -> None:
    """With values-access.yaml each pod has its own secret, and no key or address that all share."""
    for resource in yaml.safe_load_all(manifest):
        if resource["kind"] != "Deployment":
            continue
        (container,) = resource["spec"]["template"]["spec"]["containers"]
        name = container["name"].split("-")[0]  # the pools of engines are one user
        shared = {one["name"] for one in container["env"]} & {
            *("ETUDE_BUS", "ETUDE_OBJECTS"),
            *("ETUDE_S3_ACCESS_KEY", "ETUDE_S3_SECRET_KEY"),
        }
        own = [one["secretRef"]["name"] for one in container.get("envFrom", [])]
        if shared or own != [f"etude-{name}"]:
            sys.exit(
                f"{container['name']}: found secrets {own} and {shared or 'nothing'} of all; allowed: etude-{name} alone"
            )


def main() -> None:
    with alone("tools"):
        build_tools()
        folder = schemas()
    kind = "{{.ResourceKind}}{{.KindSuffix}}.json"
    locations = (
        *("-schema-location", f"{folder}/{{{{.NormalizedKubernetesVersion}}}}/{kind}"),
        *("-schema-location", f"{folder}/custom/{kind}"),
    )
    refuses_what_is_missing()
    for values, own in INSTALLATIONS.items():
        manifest = TOOLS / f"{values.replace(' ', '-')}.rendered.yaml"
        manifest.write_text(render(values, own))
        if "access" in values:
            keeps_secrets_apart(manifest.read_text())
        for version in VERSIONS:
            print(f"{values}, Kubernetes {version}: ", end="", flush=True)
            options = ("-strict", "-summary", "-kubernetes-version", version)
            run(TOOLS / "kubeconform", *options, *locations, manifest, quiet=False)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m infra.helm.check", description=(__doc__ or "").split("\n")[0]).parse_args()
    main()
