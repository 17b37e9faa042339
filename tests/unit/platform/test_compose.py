"""What docker-compose.yml promises, read from the file: no engine is needed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.object_rules import OBJECTS
from etude.supervisor import SERVICES
from services.console.config import ConsoleSettings
from services.console.site import ALWAYS_OPEN
from services.inference.sglang.flags import WRITTEN_FOR
from shared.contracts.topics import ACCESS, Access
from shared.settings import ServiceSettings

ROOT = Path(__file__).resolve().parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
ALL: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "infra/docker/Dockerfile").read_text()
SGLANG = (ROOT / "infra/docker/sglang.Dockerfile").read_text()
OURS = {name: service for name, service in ALL.items() if str(service["image"]).startswith("etude/")}
ENDING = {"access", "demo", "cli", "dlq"}
STAYING = {name: service for name, service in ALL.items() if name not in ENDING}
ON_GPU = {name for name, service in ALL.items() if service.get("profiles") == ["gpu"]}
SECRETS = ("PASSWORD", "SECRET", "TOKEN")
# Who signs in as whom, where it is not the service's own name.
USERS = {"trainer-gpu": "trainer", "demo": "cli"} | dict.fromkeys(
    ("inference-gpu", "inference-evaluation", "inference-serving"), "inference"
)


def module_of(service: dict[str, Any]) -> str | None:
    command = service.get("command") or []
    return command[2] if command[:2] == ["python", "-m"] else None


def dockerfile(service: dict[str, Any]) -> str:
    return (ROOT / service["build"]["dockerfile"]).read_text()


def filled(text: Any, environment: dict[str, str]) -> str:
    """As docker compose fills in `${NAME-default}` and `${NAME:-default}`."""

    def value(found: re.Match[str]) -> str:
        name, empty_too, default = found[1], found[2] == ":-", found[3]
        given = environment.get(name)
        return default if given is None or (empty_too and not given) else given

    return re.sub(r"\$\{([A-Z0-9_]+)(:?-)([^}]*)\}", value, str(text))


def image_environment(text: str) -> dict[str, str]:
    """Our own variables as the image sets them, its build arguments filled in."""
    arguments = dict(re.findall(r"^ARG ([A-Z0-9_]+)=(\S+)", text, re.MULTILINE))
    found = dict(re.findall(r"\b(ETUDE_[A-Z0-9_]+)=(\S+)", text))
    return {name: re.sub(r"\$\{(\w+)\}", lambda m: arguments[m[1]], value) for name, value in found.items()}


def test_every_service_of_the_supervisor_runs_under_its_name():
    for name, module in SERVICES:
        assert module_of(ALL[name]) == module


@pytest.mark.parametrize("name", [name for name in OURS if module_of(OURS[name])])
def test_a_command_names_a_module_that_exists(name):
    assert importlib.util.find_spec(module_of(OURS[name]) or "")


def test_no_secret_is_written_down_and_none_has_a_default():
    """Each comes from .env by `${NAME:?…}`, whole or inside a URL: a missing one ends `docker compose up` with its name."""
    required = re.compile(r"\$\{[A-Z0-9_]+:\?[^}]+\}")
    for name, service in ALL.items():
        for key, value in (service.get("environment") or {}).items():
            held = str(value)
            inside = re.search(r"://[^@]*:[^@]*@", held) or "password=" in held
            if any(word in key for word in SECRETS) or inside or "AUTH" in key:
                if key.startswith(("GF_AUTH_", "KAFKA_AUTHORIZER_")):
                    continue
                assert required.search(held), f"{name}: {key}"
    text = (ROOT / "docker-compose.yml").read_text()
    assert not re.search(r"\$\{ETUDE_\w*(PASSWORD|KEY|SECRET\w*)(:?-)", text)


def of_env(value: object) -> set[str]:
    """The variables of .env that a value is made of."""
    return set(re.findall(r"\$\{([A-Z0-9_]+)", str(value)))


@pytest.mark.parametrize("name", [name for name in OURS if name != "access"])
def test_a_service_signs_in_as_itself_and_holds_no_secret_of_another(name):
    user, held = USERS.get(name, name), OURS[name]["environment"]
    assert user in {**ACCESS, **OBJECTS}
    assert ("ETUDE_BUS" in held) == (ACCESS[user] != Access())
    assert ("ETUDE_S3_SECRET_KEY" in held) == (user in OBJECTS)
    if "ETUDE_BUS" in held:
        login = rf"kafka://etude-{user}:\$\{{ETUDE_SECRET_{user.upper()}:\?[^}}]+\}}"
        assert re.fullmatch(rf"{login}@\$\{{ETUDE_KAFKA:-kafka:9092\}}", held["ETUDE_BUS"])
    if "ETUDE_S3_SECRET_KEY" in held:
        assert held["ETUDE_S3_ACCESS_KEY"] == f"etude-{user}"
        assert of_env(held["ETUDE_S3_SECRET_KEY"]) == {f"ETUDE_SECRET_{user.upper()}"}
    named = {one for value in held.values() for one in of_env(value)}
    assert {one for one in named if one.startswith("ETUDE_SECRET_")} == {f"ETUDE_SECRET_{user.upper()}"}


@pytest.mark.parametrize(
    ("root", "server"),
    [("ETUDE_S3_ACCESS_KEY", "minio"), ("ETUDE_S3_SECRET_KEY", "minio"), ("ETUDE_KAFKA_PASSWORD", "kafka")],
)
def test_an_administrator_is_known_to_the_server_itself_and_to_the_one_that_gives_keys(root, server):
    holders = {
        name
        for name, service in ALL.items()
        if any(
            root in of_env(value) for value in (*(service.get("environment") or {}).values(), service.get("command"))
        )
    }
    assert holders == {server, "access"}


def test_kafka_lets_in_nobody_without_a_login_and_allows_nothing_without_a_rule():
    kafka = ALL["kafka"]["environment"]
    listeners = dict(pair.split(":") for pair in kafka["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(","))
    assert set(re.findall(r"(\w+)://", kafka["KAFKA_LISTENERS"])) == set(listeners)
    assert set(listeners.values()) == {"SASL_PLAINTEXT"}
    assert "SASL" not in kafka["KAFKA_ADVERTISED_LISTENERS"], "the image would ask for a file of logins"
    assert kafka["KAFKA_AUTHORIZER_CLASS_NAME"] == "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
    assert kafka["KAFKA_ALLOW_EVERYONE_IF_NO_ACL_FOUND"] == "false"
    assert kafka["KAFKA_SUPER_USERS"] == "User:etude"
    plain = [value for name, value in kafka.items() if "PLAIN_SASL_JAAS" in name]
    assert [re.findall(r"user_(\w+)=", value) for value in plain] == [["etude"], ["etude"]]


def test_who_gives_keys_has_the_secret_of_each_that_signs_in_and_all_of_them_wait_for_it():
    users = {USERS.get(name, name) for name in OURS if name != "access"}
    held = {key: value for key, value in ALL["access"]["environment"].items() if key.startswith("ETUDE_SECRET_")}
    assert held.keys() == {f"ETUDE_SECRET_{user.upper()}" for user in users}
    assert all(of_env(value) == {key} for key, value in held.items())
    assert ALL["access"]["command"] == ["etude", "access", "set"]
    assert not ALL["access"].get("profiles")
    assert "unless-stopped" not in ALL["access"]["restart"], "its end is what the others wait for"
    for name in OURS.keys() - ENDING:
        assert ALL[name]["depends_on"]["access"] == {"condition": "service_completed_successfully"}


def test_the_example_names_every_variable_and_gives_away_no_secret():
    text = (ROOT / "docker-compose.yml").read_text()
    used = set(re.findall(r"\$\{([A-Z0-9_]+)", text))
    example = (ROOT / ".env.example").read_text()
    known = set(re.findall(r"^#?([A-Z0-9_]+)=", example, re.MULTILINE))
    assert used <= known
    assert known - used == {"COMPOSE_PROFILES", "COMPOSE_FILE"}  # docker compose's own
    for name, value in re.findall(r"^([A-Z0-9_]+)=(.*)$", example, re.MULTILINE):
        assert not value or name == "COMPOSE_PROFILES"
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


def environment_writer() -> Any:
    specification = importlib.util.spec_from_file_location("env", ROOT / "infra/docker/env.py")
    assert specification
    assert specification.loader
    env = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(env)
    return env


def test_a_written_environment_has_fresh_secrets_that_fit_into_urls_and_is_never_overwritten(tmp_path):
    env = environment_writer()
    first, second = tmp_path / "a", tmp_path / "b"
    for target in (first, second):
        env.write(ROOT / ".env.example", target)
    values = [dict(re.findall(r"^([A-Z0-9_]+)=(.*)$", path.read_text(), re.MULTILINE)) for path in (first, second)]
    secrets = [value for name, value in values[0].items() if name != "COMPOSE_PROFILES"]
    assert all(re.fullmatch(r"[0-9a-f]{48}", value) for value in secrets)
    assert len(set(secrets)) == len(secrets) >= 15
    assert not set(secrets) & set(values[1].values())
    assert first.stat().st_mode & 0o077 == 0
    with pytest.raises(FileExistsError):
        env.write(ROOT / ".env.example", first)


def test_an_older_environment_gets_the_secrets_that_it_lacks_or_leaves_empty_and_keeps_its_own(tmp_path):
    env, target = environment_writer(), tmp_path / ".env"
    target.write_text(
        "ETUDE_GRAFANA_PASSWORD=mine\nETUDE_REDIS_PASSWORD=\nETUDE_TORCH_BACKEND=\nETUDE_CONSOLE_PORT=9000\n"
    )
    added = env.complete(ROOT / ".env.example", target)
    assert "ETUDE_CONSOLE_TOKEN" in added
    assert "ETUDE_GRAFANA_PASSWORD" not in added
    text = target.read_text()
    kept = "ETUDE_GRAFANA_PASSWORD=mine\nETUDE_REDIS_PASSWORD=[0-9a-f]{48}\nETUDE_TORCH_BACKEND=\nETUDE_CONSOLE_PORT=9000\n"
    assert re.match(kept, text)
    assert all(re.search(rf"^{name}=[0-9a-f]{{48}}$", text, re.MULTILINE) for name in added)
    assert env.complete(ROOT / ".env.example", target) == []
    assert target.read_text() == text


def test_a_secret_that_is_named_and_empty_is_filled_in_where_it_stands(tmp_path):
    env, target = environment_writer(), tmp_path / ".env"
    env.write(ROOT / ".env.example", target)
    whole = target.read_text()
    target.write_text(re.sub(r"^ETUDE_SECRET_GRADER=.*$", "ETUDE_SECRET_GRADER=", whole, flags=re.MULTILINE))
    assert env.complete(ROOT / ".env.example", target) == ["ETUDE_SECRET_GRADER"]
    assert [line.partition("=")[0] for line in target.read_text().splitlines()] == [
        line.partition("=")[0] for line in whole.splitlines()
    ]
    assert re.search(r"^ETUDE_SECRET_GRADER=[0-9a-f]{48}$", target.read_text(), re.MULTILINE)


def test_an_environment_without_a_registry_names_compose_files_that_exist(tmp_path):
    text = environment_writer().filled((ROOT / ".env.example").read_text(), local=True)
    (files,) = re.findall(r"^COMPOSE_FILE=(.+)$", text, re.MULTILINE)
    assert all((ROOT / name).is_file() for name in files.split(":"))
    assert not re.search(
        r"^COMPOSE_FILE=", environment_writer().filled((ROOT / ".env.example").read_text()), re.MULTILINE
    )


def test_reading_the_console_needs_a_token_and_probes_and_prometheus_need_none(tmp_path):
    said = {
        name: ALL["console"]["environment"][f"ETUDE_CONSOLE_{name}"] for name in ("READING", "OPERATORS", "VIEWERS")
    }
    assert said == {name: f"${{ETUDE_CONSOLE_{name}:-{'token' if name == 'READING' else ''}}}" for name in said}
    settings = ConsoleSettings(state=tmp_path, host="127.0.0.1", console_reading="token")
    assert not settings.open_to_readers
    probe = (ROOT / "infra/docker/probe.py").read_text()
    asked = {"/metrics", *re.findall(r'ask\("(/\w+)"', probe)}
    assert asked == {"/metrics", "/healthz", "/readyz"} <= set(ALWAYS_OPEN)


def test_ports_are_bound_to_localhost():
    published = [port for service in ALL.values() for port in service.get("ports", [])]
    assert published
    assert all(str(port).startswith("127.0.0.1:") for port in published)


@pytest.mark.parametrize("name", STAYING)
def test_a_service_is_checked_limited_restarted_and_its_log_is_bounded(name):
    service = ALL[name]
    assert service["healthcheck"]["test"]
    assert service["mem_limit"]
    cores = float(filled(service["cpus"], {}))
    assert cores <= (4.0 if name in ON_GPU else 2.0), "Docker refuses more than the machine has"
    assert service["restart"] == "unless-stopped"
    assert {"max-size", "max-file"} <= service["logging"]["options"].keys()
    assert "no-new-privileges:true" in service["security_opt"]


def test_no_container_asks_itself_through_a_proxy():
    """Docker gives every container the proxy of its own configuration; curl and wget would use it for 127.0.0.1 too."""
    asking = {
        name: words
        for name, service in STAYING.items()
        if re.search(r"\b(curl|wget)\b", words := " ".join(service["healthcheck"]["test"]))
    }
    assert asking
    assert [name for name, words in asking.items() if not re.search(r"--noproxy \*|\bhttp_proxy= wget", words)] == []


@pytest.mark.parametrize("name", OURS)
def test_our_containers_have_no_privilege_and_write_nowhere_but_where_it_is_said(name):
    service = OURS[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert not service.get("cap_add")
    assert not service.get("privileged")
    assert "seccomp=unconfined" not in service["security_opt"]
    assert not any("docker.sock" in str(volume) for volume in service["volumes"])
    text = dockerfile(service)
    assert f"AS {service['build']['target']}\n" in text
    assert re.search(rf"AS {service['build']['target']}\n(?:(?!FROM)[\s\S])*USER 10001:10001", text)


def test_one_profile_computes_on_the_cpu_and_the_other_on_gpus_and_nothing_else_differs():
    """Whoever chooses one has one trainer and one kind of engine, never both; the rest has no profile or one of its own."""
    for profile, names in {"cpu": {"trainer", "inference"}, "gpu": {"trainer-gpu", "inference-gpu"}}.items():
        assert {name for name, service in ALL.items() if profile in service.get("profiles", [])} == names
    (prometheus,) = (ROOT / "infra/prometheus").glob("prometheus.yml")
    assert all(name in prometheus.read_text() for name in ON_GPU)


@pytest.mark.parametrize("name", sorted(ON_GPU))
def test_what_computes_on_gpus_sees_those_that_env_gives_it(name):
    """Docker's `count: 1` is the first device, for both of them."""
    (device,) = ALL[name]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    chosen = {"ETUDE_TRAINER_GPU": "7", "ETUDE_INFERENCE_GPUS": "1,2"}
    seen = {"trainer-gpu": "7", "inference-gpu": "1,2"}
    assert filled(ALL[name]["environment"]["CUDA_VISIBLE_DEVICES"], chosen) == seen[name]


def test_the_image_for_gpus_brings_the_sglang_that_its_flags_were_written_for():
    """Tag, the check while it is built, and what the compose file asks for."""
    build = ALL["inference-gpu"]["build"]
    assert f"ARG SGLANG=lmsysorg/sglang:v{WRITTEN_FOR}\n" in SGLANG
    assert f"assert v('sglang') == '{WRITTEN_FOR}'" in SGLANG
    assert filled(build["args"]["SGLANG"], {}) == f"lmsysorg/sglang:v{WRITTEN_FOR}"
    # Ours in every image: both files say the same, but for what makes this one SGLang's.
    theirs = image_environment(SGLANG)
    assert theirs.pop("ETUDE_ENGINE") == ALL["inference-gpu"]["environment"]["ETUDE_ENGINE"] == "sglang"
    assert theirs.pop("ETUDE_SGLANG_PYTHON").startswith("/")
    assert theirs == image_environment(DOCKERFILE)


def test_what_kernels_are_compiled_to_survives_a_container():
    mounted = {
        volume.split(":")[1]: volume.split(":")[0] for volume in ALL["inference-gpu"]["volumes"] if ":" in volume
    }
    caches = re.findall(r"\b(?:HOME|TORCHINDUCTOR_CACHE_DIR|NUMBA_CACHE_DIR)=(/\S+)", SGLANG)
    assert len(caches) == 3
    assert all(path.split("/")[1] == "kernels" for path in caches)
    assert mounted["/kernels"] in COMPOSE["volumes"]


@pytest.mark.parametrize(
    ("chosen", "arguments"),
    [
        ({}, ["--mem-fraction-static", "0.4"]),
        ({"ETUDE_SGLANG_TP": "2", "ETUDE_SGLANG_EP": "2"}, ["--tp-size", "2", "--ep-size", "2"]),
        ({"ETUDE_SGLANG_DP": "2", "ETUDE_SGLANG_DRAFT_STEPS": "2"}, ["--dp-size", "2", "--speculative-num-steps", "2"]),
    ],
)
def test_the_container_for_gpus_starts_sglang_with_what_env_says(chosen, arguments, tmp_path):
    """`etude inference flags` with the container's own environment, for the shipped policy."""
    service = ALL["inference-gpu"]
    told = {name: filled(value, chosen) for name, value in service["environment"].items()}
    environment = {
        **image_environment(SGLANG),
        **told,
        "ETUDE_STATE": str(tmp_path),
        "ETUDE_BUS": "",
        "ETUDE_OBJECTS": "",
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ETUDE_")}
    done = subprocess.run(
        [sys.executable, "-m", "etude.cli", "inference", "flags", str(ROOT / "etude/data/base")],
        env={**inherited, **environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    words = [word for word in shlex.split(done.stdout) if not re.match(r"[A-Z0-9_]+=", word)]
    assert words[:3] == ["/usr/bin/python3", "-m", "sglang.launch_server"]
    for flag, value in zip(arguments[::2], arguments[1::2], strict=True):
        assert words[words.index(flag) + 1] == value
    assert words[words.index("--device") + 1] == "cuda"
    assert ("--tp-size" in words) == ("ETUDE_SGLANG_TP" in chosen)
    assert "--quantization" not in words


def test_candidate_code_runs_where_the_profile_is_and_nowhere_else():
    """Who asks for sandboxes has an image with bubblewrap and the profile; nobody else has either."""
    wants = {name for name, module in SERVICES if _asks_for_sandboxes(module)} | {"demo"}
    has = {
        name
        for name, service in OURS.items()
        if "bubblewrap" in _stage(dockerfile(service), service["build"]["target"])
    }
    profiled = {name for name, s in OURS.items() if "seccomp=infra/docker/seccomp-worker.json" in s["security_opt"]}
    assert wants == has == profiled
    unmasked = {name for name, service in OURS.items() if "systempaths=unconfined" in service["security_opt"]}
    assert unmasked == profiled, "sandboxes of commands mount a /proc of their own"


def _stage(text: str, target: str) -> str:
    (stage,) = re.findall(rf"^FROM \S+ AS {target}\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    return stage


def test_the_demo_has_what_it_needs_to_read_a_pack_with_the_base_policy():
    """It makes the pack in sandboxes, computes with torch how surprising each repair is, and keeps that in the volume."""
    assert ALL["demo"]["build"]["target"] == "demo"
    assert "COPY --from=trainer-packages" in _stage(DOCKERFILE, "with-trainer")
    assert "FROM with-trainer AS demo\n" in DOCKERFILE
    assert "packs:/packs" in ALL["demo"]["volumes"]
    assert ALL["demo"]["working_dir"] == "/packs"


@pytest.mark.parametrize("name", OURS)
def test_an_image_says_last_which_commit_it_is_made_of(name):
    """By build arguments, behind all that takes time: another commit alone makes no layer anew."""
    build, lines = (
        OURS[name]["build"],
        _stage(dockerfile(OURS[name]), OURS[name]["build"]["target"]).strip().splitlines(),
    )
    lines = [line for line in lines if line and not line.startswith("#")]
    (label,) = [number for number, line in enumerate(lines) if line.startswith("LABEL ")]
    assert not {line.split()[0] for line in lines[label:]} & {"RUN", "COPY"}
    for argument, what in {"REVISION": "revision", "CREATED": "created", "VERSION": "version"}.items():
        assert f"org.opencontainers.image.{what}=${argument}" in lines[label]
        assert argument in lines[label - 1].split()[1:]
        assert build["args"][argument].startswith(f"${{ETUDE_{argument}:-")


def test_labels_are_of_the_commit_and_its_time_never_of_now(tmp_path):
    def git(*arguments: str) -> str:
        identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        dates = {"GIT_AUTHOR_DATE": "2001-01-01T00:00:00+0000", "GIT_COMMITTER_DATE": "2002-03-04T05:06:07+0200"}
        command, environment = ["git", *arguments], {**os.environ, **identity, **dates}
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    def says() -> list[str]:
        script = f'. {ROOT}/infra/docker/revision.sh && printf "%s\\n" "$ETUDE_REVISION" "$ETUDE_CREATED"'
        done = subprocess.run(["sh", "-euc", script], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.split()

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "one")
    revision = git("rev-parse", "HEAD").strip()
    assert says() == [revision, "2002-03-04T03:06:07Z"]
    (tmp_path / "a").write_text("2")
    assert says() == [f"{revision}-dirty", "2002-03-04T03:06:07Z"]


def test_what_a_service_imports_at_its_start_is_compiled_in_its_image():
    """In `light` and `worker` alone: the others are compiled as a whole."""
    for service in OURS.values():
        if service["build"]["target"] in ("light", "worker") and (module := module_of(service)):
            package = (ROOT.joinpath(*module.split(".")) / "__main__.py").exists()
            assert (f"{module}.__main__" if package else module) in _stage(DOCKERFILE, "packages")


def test_server_images_have_one_exact_version():
    for name in ALL.keys() - OURS.keys():
        assert re.search(r":v?\d+\.\d+(\.\d+)?$|:RELEASE\.[0-9TZ-]+$", ALL[name]["image"]), name


def test_the_sdk_of_traces_is_in_every_image_that_is_built_with_it_and_never_in_the_demos():
    """Problems are made from what is installed in the demo's image."""
    built = {name: service["build"] for name, service in OURS.items()}
    assert {name for name, build in built.items() if "EXTRAS" not in build.get("args", {})} == {"demo"}
    stages = re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.MULTILINE)
    assert {name for name in stages if "${EXTRAS}" in _stage(DOCKERFILE, name)} == {
        "packages",
        "inference-packages",
        "trainer-extras",
    }
    assert "${EXTRAS}" in _stage(SGLANG, "packages")
    assert "COPY --from=trainer-extras" in _stage(DOCKERFILE, "trainer")
    assert "extras" not in (_stage(DOCKERFILE, "with-trainer") + _stage(DOCKERFILE, "demo")).lower()
    assert ALL["demo"]["environment"]["ETUDE_TRACES"] == 0
    assert COMPOSE["x-environment"]["ETUDE_TRACES"] == "${ETUDE_TRACES:-0}"


def test_every_service_is_told_where_spans_go():
    for name, service in OURS.items():
        if module_of(service):
            assert {"ETUDE_TRACES", "OTEL_EXPORTER_OTLP_ENDPOINT"} <= service["environment"].keys(), name
            assert "platform" in service["networks"], name  # where the collector is


def _asks_for_sandboxes(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__main__.py"
    return "opened_places(" in source.read_text()


@pytest.mark.parametrize("name", OURS)
def test_settings_are_named_as_the_service_knows_them(name):
    module = module_of(OURS[name])
    fields = set(ServiceSettings.model_fields)
    if module:
        config = importlib.import_module(f"{'.'.join(module.split('.')[:2])}.config")
        for item in vars(config).values():
            if isinstance(item, type) and issubclass(item, ServiceSettings):
                fields |= set(item.model_fields)
    named = {key.removeprefix("ETUDE_").lower() for key in OURS[name]["environment"] if key.startswith("ETUDE_")}
    if name == "access":  # `etude access set` reads these itself
        named = {key for key in named if not key.startswith("secret_")}
    image = {key.removeprefix("ETUDE_").lower() for key in image_environment(dockerfile(OURS[name]))}
    assert named | image <= fields


def test_who_needs_a_server_is_on_its_network_and_waits_for_it():
    reaches = {"ETUDE_BUS": "kafka", "ETUDE_OBJECTS": "minio", "ETUDE_LEDGER": "postgres", "ETUDE_JOBS": "redis"}
    for name, service in OURS.items():
        if name in ENDING - {"access"}:
            continue  # `demo` waits for services that wait for the servers, the others for nobody
        for setting, server in reaches.items():
            if setting in service["environment"]:
                assert set(service["networks"]) & set(ALL[server]["networks"]), f"{name} → {server}"
                assert service["depends_on"][server] == {"condition": "service_healthy"}
    assert {name for name, s in OURS.items() if "ETUDE_LEDGER" in s["environment"]} == {"scheduler"}, "its only writer"
    assert [name for name, s in ALL.items() if "ledger" in s["networks"]] == ["postgres", "scheduler"]


def test_only_what_has_a_port_is_on_a_network_with_a_way_out():
    outside = {name for name, network in COMPOSE["networks"].items() if not network.get("internal")}
    for name, service in ALL.items():
        assert bool(outside & set(service["networks"])) == bool(service.get("ports")), name


def test_with_hosts_for_sandboxes_the_rollout_workers_alone_have_a_way_out_more():
    more = yaml.safe_load((ROOT / "infra/docker/hosts.yml").read_text())
    assert set(more) == {"services", "networks"}
    assert set(more["services"]) == {"rollout"}, "gradings have no network"
    assert set(more["services"]["rollout"]) == {"networks"}, "no privilege comes with it"
    [new] = set(more["networks"]) - set(COMPOSE["networks"])
    assert not (more["networks"][new] or {}).get("internal")
    assert set(more["services"]["rollout"]["networks"]) == {*ALL["rollout"]["networks"], new}


def test_every_mounted_file_and_volume_exists():
    for name, service in ALL.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists(), f"{name}: {source}"
            elif ":" in volume:
                assert source in COMPOSE["volumes"], f"{name}: {source}"
        for option in service.get("security_opt", []):
            if option.startswith("seccomp="):
                assert (ROOT / option.removeprefix("seccomp=")).exists()


SCALES = {name: f"ETUDE_{name.upper()}S" for name in ("rollout", "grader", "reward", "inference")}


def test_how_many_there_are_of_what_scales_stands_in_env_so_that_every_up_says_the_same():
    """`--scale` holds until the next `up`. One that takes another's definition takes its number, too, unless it says its own."""
    said = {name: str(service["scale"]) for name, service in ALL.items() if "scale" in service}
    assert {name: said[name] for name in SCALES} == {name: f"${{{number}:-1}}" for name, number in SCALES.items()}
    assert {name: number for name, number in said.items() if name not in SCALES} == dict.fromkeys(
        ("inference-gpu", "inference-evaluation", "inference-serving"), "1"
    )


def test_what_scales_has_no_name_and_no_port_of_its_own():
    for name in SCALES:
        assert "container_name" not in ALL[name]
        assert "ports" not in ALL[name]
        assert "ETUDE_NAME" not in ALL[name]["environment"]


def test_the_profile_allows_what_namespaces_need_and_refuses_the_rest():
    profile = json.loads((ROOT / "infra/docker/seccomp-worker.json").read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    free = {
        name
        for rule in profile["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW" and not rule.get("args")
        for name in rule["names"]
    }
    assert {"clone", "mount", "umount2", "pivot_root", "sethostname", "unshare"} <= free
    dangerous = (
        *(
            "bpf",
            "setns",
            "init_module",
            "finit_module",
            "delete_module",
            "kexec_load",
            "kexec_file_load",
            "reboot",
        ),
        *("iopl", "ioperm", "acct", "swapon", "swapoff", "open_by_handle_at", "perf_event_open", "keyctl", "add_key"),
        *("request_key", "userfaultfd", "quotactl", "fsopen", "fsmount", "fsconfig", "fspick", "open_tree", "clone3"),
        *("move_mount", "mount_setattr", "io_uring_setup", "nfsservctl", "chroot", "syslog", "settimeofday"),
    )
    assert not free & set(dangerous)
    for rule in profile["syscalls"]:  # conditions would read as none where the file is taken as the OCI's plain format
        assert not {"includes", "excludes"} & rule.keys()


def test_without_an_image_registry_every_image_has_a_recipe_of_its_own():
    local = ROOT / "infra" / "docker" / "local"
    override = yaml.safe_load((local / "compose.yml").read_text())["services"]
    assert override.keys() == ALL.keys() - {"inference-gpu"}, "SGLang's own image comes from a registry alone"
    # What cannot be built stays out of `up` until its profile is asked for.
    assert {name for name, service in override.items() if "profiles" in service} == {"grafana"}
    for name, service in override.items():
        if name in OURS:
            there = service["build"]["args"]
            assert (there["PYTHON"], there["RUNTIME"]) == ("etude-local/python:3.11", "etude-local/python:3.11-slim")
        elif name != "grafana":  # nobody packages it
            assert (local / service["image"].removeprefix("etude-local/") / "Dockerfile").exists()


def test_without_an_image_registry_each_of_our_images_is_built_by_one_service():
    script = (ROOT / "infra/docker/local/build.sh").read_text()
    (names,) = re.findall(r"--profile '\*' build \\\n((?: +[a-z-]+)+)", script)
    images = [ALL[name]["image"] for name in names.split()]
    assert sorted(images) == sorted({service["image"] for name, service in OURS.items() if name != "inference-gpu"})
