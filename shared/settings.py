"""Settings alike for every service: environment variables (`ETUDE_…`) over a TOML file (`ETUDE_CONFIG`), validated at start.

The URL of an outside system chooses its adapter. Defaults are the embedded ones, below one state directory. Environment and
file are one for all services: each takes its own and passes over the others'; what none declares is refused by all.
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import sys
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

S = TypeVar("S", bound="ServiceSettings")
CLOSE = 0.9  # likeness of two names above which one is taken for a slip of the pen
ALIKE = 0.6  # the same for a name that is refused in any case: what may have been meant
REFUSED = 2  # exit code of a service whose settings are bad: starting it again changes nothing
_CREDENTIALS = re.compile(r"^([A-Za-z0-9+.-]*:)?(/{0,2}).*@", re.DOTALL)
_UNREAD = re.compile(r'field "(\w+)"')  # of a SettingsError
_PASSWORD = re.compile(r"(://[^/@:\s]*:)[^@\s]+@")


class Told(Exception):
    """An error whose text says all that a person needs: who ends with it prints that, and no stack trace."""


class BadSettings(Told, ValueError):
    """A line for each setting that is wrong: where it stands, what was found, what is allowed, what to do."""


# What an address of each outside system begins with -> its form, for people. An adapter's own parser judges the rest.
ADDRESSES: dict[str, dict[str, str]] = {
    "bus": {"sqlite:": "sqlite:PATH", "kafka://": "kafka://[USER:PASSWORD@]HOST:PORT[,…][/PREFIX][?tls=1&…]"},
    "ledger": {
        "sqlite:///": "sqlite:///PATH",
        "postgresql://": "postgresql://USER:PASSWORD@HOST/NAME",
        "postgresql+psycopg://": "postgresql+psycopg://USER:PASSWORD@HOST/NAME",
    },
    "objects": {"file:": "file:PATH", "s3://": "s3://BUCKET@HOST:PORT"},
    "jobs": {
        "sqla+sqlite:///": "sqla+sqlite:///PATH",
        "redis://": "redis://[:PASSWORD@]HOST:PORT/DATABASE",
        "rediss://": "rediss://[:PASSWORD@]HOST:PORT/DATABASE",
        "amqp://": "amqp://USER:PASSWORD@HOST:PORT/NAME",
        "amqps://": "amqps://USER:PASSWORD@HOST:PORT/NAME",
    },
}


def _form(setting: str) -> dict[str, Any]:
    """For docs/settings.md."""
    return {"allowed": ", ".join(ADDRESSES[setting].values())}


def _one_letter_apart(one: str, other: str) -> bool:
    """For schemes too short to be alike by share: s4 and s3."""
    return len(one) == len(other) and sum(a != b for a, b in zip(one, other, strict=True)) == 1


class ServiceSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="ETUDE_", extra="forbid", env_ignore_empty=True)

    state: Path = Field(Path(".etude"), description="Directory for everything local: logs, caches, embedded stores.")
    bus: str = Field(
        "",
        description="Where the bus is (docs/servers.md has the parameters of Kafka); empty: sqlite below the state directory.",
        json_schema_extra=_form("bus"),
    )
    ledger: str = Field(
        "",
        description="SQLAlchemy URL of the ledger; empty: SQLite below the state directory.",
        json_schema_extra=_form("ledger"),
    )
    objects: str = Field(
        "",
        description="Where the object store is (docs/servers.md); empty: a directory below the state directory.",
        json_schema_extra=_form("objects"),
    )
    jobs: str = Field(
        "", description="Celery broker URL; empty: SQLite below the state directory.", json_schema_extra=_form("jobs")
    )
    s3_access_key: SecretStr = Field(SecretStr(""), description="Only for s3:// objects.")
    s3_secret_key: SecretStr = Field(SecretStr(""), description="Only for s3:// objects.")
    host: str = Field("127.0.0.1", description="Address that the HTTP endpoints bind to.")
    advertise: str = Field(
        "",
        description="Name or address under which other machines reach `host`; empty: `host`, or where that is a "
        "wildcard (0.0.0.0, ::) this machine's name.",
    )
    port: int = Field(0, ge=0, le=65535, description="Port of this service's HTTP endpoints; 0: a free one.")
    name: str = Field("", description="Stable name of this replica; empty: made from service, host and process.")
    neighbours: dict[str, list[Annotated[str, Field(pattern=r"^[^\s/:]+:[0-9]{1,5}$")]]] = Field(
        {},
        json_schema_extra={"allowed": 'JSON, as {"reward": ["HOST:PORT"]}'},
        description="Service → names of the network, each HOST:PORT, as JSON: every address that such a name has is a replica. "
        "The console, `etude status` and `etude weights verify` ask them besides those that announced themselves below the state "
        "directory.",
    )
    sandbox_bases_gb: float = Field(
        20.0,
        ge=0,
        description="Room that unpacked bases of sandboxes may take below the state directory, in GB; more: those that no process "
        "has open are removed, the one unused longest first (docs/sandboxes.md).",
    )
    sandbox_image: str = Field(
        "",
        pattern=r"^((base|docker|pool):.+)?$",
        json_schema_extra={"allowed": "empty, base:NAME, base:DIGEST, docker:REFERENCE, pool:NAME"},
        description="What the sandbox of a repository begins with where its problem names no image: base:NAME or base:DIGEST "
        "(`etude sandbox base list`), docker:REFERENCE, or pool:NAME of warm pods; empty: the programs of the service's own "
        "machine. The same for all services (docs/sandboxes.md).",
    )
    sandbox_namespace: str = Field(
        "etude-sandboxes",
        pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        json_schema_extra={"allowed": "at most 63 of a-z, 0-9 and -, no - at either end"},
        description="With ETUDE_SANDBOX=kubernetes: the namespace of the sandboxes' pods, which holds nothing else "
        "(docs/sandboxes.md, *In pods of a cluster*).",
    )
    sandbox_loader: str = Field(
        "",
        description="With ETUDE_SANDBOX=kubernetes: the image of Étude's workers, which brings the loop into pods of other images; "
        "empty: only pool:NAME can be had.",
    )
    sandbox_runtime: str = Field(
        "",
        description="With ETUDE_SANDBOX=kubernetes: the RuntimeClass of pods of images; empty: the cluster's default.",
    )
    sandbox_agents: Path | None = Field(
        None,
        description="A folder with agents of others, which attempts of kinds `agent` and `verifiers` see read-only as /opt/agents "
        "(docs/agents.md).",
    )
    sandbox_credentials: Path | None = Field(
        None,
        description="File of the credentials that problems may name in their field `network`, as JSON; the egress proxy adds them "
        "outside of the sandbox (docs/sandboxes.md, *Network*). Empty: there are none.",
    )
    logs: str = Field(
        "auto",
        pattern="^(auto|json|text)$",
        json_schema_extra={"allowed": "auto, json, text"},
        description="Log format; auto: text on a terminal, else JSON.",
    )
    log_level: str = Field(
        "INFO",
        pattern="^(DEBUG|INFO|WARNING|ERROR)$",
        json_schema_extra={"allowed": "DEBUG, INFO, WARNING, ERROR"},
        description="Least severe event that is logged.",
    )
    traces: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the attempts whose spans go to an OpenTelemetry collector, 1 for all; 0: none. Needs the extra "
        "`traces`; where to, says `OTEL_EXPORTER_OTLP_ENDPOINT` (docs/tracing.md).",
    )

    @field_validator(*ADDRESSES)
    @classmethod
    def _begins_as_an_address(cls, url: str, info: ValidationInfo) -> str:
        """A scheme that no adapter has would be told by services that die again and again, each in its log alone."""
        forms = ADDRESSES[str(info.field_name)]
        if not url or any(url.startswith(start) and url != start for start in forms):
            return url
        schemes = {start.partition(":")[0]: form for start, form in forms.items()}
        scheme = url.partition(":")[0].lower()
        near = get_close_matches(scheme, schemes, 1, ALIKE) or [
            known for known in schemes if _one_letter_apart(scheme, known)
        ]
        meant = f"did you mean {schemes[near[0]]}? Allowed" if near else "allowed"
        raise ValueError(f"{meant}: {', '.join(forms.values())}")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        others = declared() - settings_cls.model_fields.keys()
        mine = {name: value for name, value in _file().items() if name not in others}
        return (init_settings, env_settings, InitSettingsSource(settings_cls, mine))

    @property
    def reachable(self) -> str:
        """Under which name or address the others reach this service. A wildcard is none: it means every machine itself."""
        if self.advertise:
            return self.advertise
        return socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host

    @property
    def bus_url(self) -> str:
        return self.bus or embedded(self.state)["bus"]

    @property
    def ledger_url(self) -> str:
        return self.ledger or embedded(self.state)["ledger"]

    @property
    def objects_url(self) -> str:
        return self.objects or embedded(self.state)["objects"]

    @property
    def jobs_url(self) -> str:
        return self.jobs or embedded(self.state)["jobs"]


def load(cls: type[S], argv: list[str] | None = None) -> S:
    """Settings of a service. With `--check` in argv prints the resolved whole, secrets masked, and exits 0; with `--help` what
    there is to set. A bad value ends the process with code REFUSED and the text of BadSettings."""
    argv = sys.argv[1:] if argv is None else argv
    if {"--help", "-h"} & set(argv):
        print(explained(cls, sys.modules["__main__"].__doc__ or ""))
        raise SystemExit(0)
    try:
        settings = read(cls)
    except BadSettings as error:
        for line in str(error).splitlines():
            print(f"{cls.__name__}: {line}", file=sys.stderr)
        raise SystemExit(REFUSED) from None
    unknown = [k for k in argv if k not in ("--check",)]
    if unknown:
        print(
            f"unknown argument {unknown[0]!r}; allowed: --check, --help (settings come from ETUDE_… and ETUDE_CONFIG)",
            file=sys.stderr,
        )
        raise SystemExit(REFUSED)
    if "--check" in argv:
        print(dump(settings))
        raise SystemExit(0)
    return settings


def read(cls: type[S], **given: Any) -> S:
    """The resolved settings; `given` goes before all sources. Raises BadSettings. A secret's value is never told, and neither
    is that of a field that nobody knows: it may be a slip in a secret's name."""
    try:
        _require_names(cls)
        return cls(**given)
    except ValidationError as error:
        told = [
            _told(cls, problem["loc"], problem["type"], problem.get("input"), problem["msg"])
            for problem in error.errors()
        ]
        raise BadSettings("\n".join(told)) from None
    except SettingsError as error:  # a structure that is no JSON; the text names the field alone
        if (found := _UNREAD.search(str(error))) is None:
            raise BadSettings(str(error)) from None
        (field,) = found.groups()
        value = os.environ.get(f"ETUDE_{field.upper()}")
        raise BadSettings(_told(cls, (field,), "json_invalid", value, "")) from None
    except (OSError, ValueError) as error:
        raise BadSettings(str(error)) from None


def _told(cls: type[ServiceSettings], place: tuple[int | str, ...], kind: str, value: object, message: str) -> str:
    field = str(place[0]) if place else ""
    variable = f"ETUDE_{field.upper()}"
    if variable in os.environ:
        where, way_out = f"setting {'.'.join([variable, *map(str, place[1:])])}", "change or unset it"
    else:
        field = ".".join(map(str, place))
        where, way_out = f"setting {field!r} in {os.environ.get('ETUDE_CONFIG', 'the call')}", "change or remove it"
    if kind == "extra_forbidden":
        near = get_close_matches(field, _known(cls), 1, ALIKE)
        return f"{where}: not known{f'; did you mean {near[0]!r}?' if near else ''} ({way_out}; docs/settings.md lists all)"
    if kind in ("string_pattern_mismatch", "json_invalid"):
        message = _allowed(cls, place, str(value)) or message
    value = without_credentials(str(value)) if field in ADDRESSES else value
    found = "" if _secret(cls, place) else f"found {value!r}: "
    return f"{where}: {found}{message.removeprefix('Value error, ')} ({way_out}; docs/settings.md says what it does)"


def _allowed(cls: type[ServiceSettings], place: tuple[int | str, ...], value: str) -> str:
    """Return in words what a setting of a certain form allows, and the nearest address where it is one. Empty: it does not say."""
    field = cls.model_fields.get(str(place[0])) if place else None
    words = field.json_schema_extra.get("allowed") if field and isinstance(field.json_schema_extra, dict) else None
    if not words:
        return ""
    form, _, _ = str(words).partition(" ")
    scheme, colon, _ = value.partition("://")
    if form.startswith("http(s)") and colon and scheme not in ("http", "https"):
        near = get_close_matches(scheme.lower(), ("http", "https"), 1, ALIKE)
        if near:
            return f"did you mean {form.replace('http(s)', near[0])}? Allowed: {words}"
    return f"allowed: {words}"


def _secret(cls: type[ServiceSettings], place: tuple[int | str, ...]) -> bool:
    """Whether the setting holds a secret, itself or in what it consists of."""
    field = cls.model_fields.get(str(place[0])) if place else None
    return field is None or SecretStr.__name__ in repr(field.annotation)


@functools.cache
def declared() -> frozenset[str]:
    """Every field that some service declares, whichever are installed here. Written by `python -m infra.generate`."""
    return frozenset(json.loads(Path(__file__).with_name("declared_settings.json").read_text()))


def _known(cls: type[ServiceSettings]) -> frozenset[str]:
    return declared() | cls.model_fields.keys()


def _file() -> dict[str, Any]:
    """What stands in the file that ETUDE_CONFIG names; nothing where it names none. Raises ValueError."""
    path = os.environ.get("ETUDE_CONFIG")
    if not path:
        return {}
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ValueError(f"ETUDE_CONFIG: found {path!r}: {error.strerror}; allowed: a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"ETUDE_CONFIG: {path} is no TOML: {error}") from None


def _require_names(cls: type[ServiceSettings]) -> None:
    """A variable that is almost a setting of any service would be passed over in silence. (One that is like none may be
    somebody else's.) Raises ValueError."""
    known = {f"ETUDE_{name.upper()}" for name in _known(cls)}
    slips = [
        f"setting {name}: not known; did you mean {like[0]}? (rename or unset it)"
        for name in sorted(os.environ)
        if name.startswith("ETUDE_") and name not in known and (like := get_close_matches(name, known, 1, CLOSE))
    ]
    if slips:
        raise ValueError("\n".join(slips))


def explained(cls: type[ServiceSettings], about: str) -> str:
    """For `--help`: what the program is, and the settings that it has beside those of every service."""
    own = [
        f"  ETUDE_{name.upper()} = {default if (default := field.get_default(call_default_factory=True)) is not None else ''}\n"
        f"      {field.description}"
        for name, field in cls.model_fields.items()
        if name not in ServiceSettings.model_fields
    ]
    return "\n\n".join(
        (
            about.strip(),
            "--check prints the resolved settings, secrets masked, and exits. Its own, with their defaults:",
            "\n".join(own),
            f"Those of every service ({', '.join(f'ETUDE_{name.upper()}' for name in ServiceSettings.model_fields)}): "
            "docs/settings.md.",
        )
    )


def dump(settings: ServiceSettings) -> str:
    """The resolved settings, one `name = value` a line, secrets masked, passwords in URLs too."""
    values: dict[str, Any] = settings.model_dump(mode="json")
    return "\n".join(
        f"{name} = {masked(value) if isinstance(value, str) else value!r}" for name, value in values.items()
    )


def embedded(state: Path) -> dict[str, str]:
    """Return the address of every embedded adapter below `state`, by its setting. SQLAlchemy decodes percent signs and takes a
    question mark for options, so both are written as codes for it."""
    coded = str(state).replace("%", "%25").replace("?", "%3F")
    return {
        "bus": f"sqlite:{state / 'bus.db'}",
        "ledger": f"sqlite:///{Path(coded) / 'ledger.db'}",
        "objects": f"file:{state / 'objects'}",
        "jobs": f"sqla+sqlite:///{Path(coded) / 'jobs.db'}",
    }


def path_and_options(address: str) -> tuple[str, str]:
    """Split `PATH?OPTIONS`. No option has a slash, so a question mark before one is part of a folder's name."""
    path, mark, options = address.rpartition("?")
    return (path, options) if mark and "/" not in options else (address, "")


def in_url(host: str) -> str:
    """An address of IPv6 stands in brackets."""
    return f"[{host}]" if ":" in host else host


def masked(url: str) -> str:
    """For people: the password of a URL replaced by stars."""
    return _PASSWORD.sub(r"\1***@", url)


def without_credentials(url: str) -> str:
    """For people: a URL that could not be read. Where its password stands is not known, but that it stands before an @."""
    return _CREDENTIALS.sub(r"\1\2…@", url)
