"""Users and policies of a MinIO, by its administration API. (Another S3 has its own tools: `etude access s3 policy` prints.)"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etude.object_rules import OBJECTS, policy
from shared.settings import ServiceSettings, Told, without_credentials

if TYPE_CHECKING:
    from minio.minioadmin import MinioAdmin

CONNECT_S, READ_S = 3.0, 20.0
NAMES = (3, 20)  # characters of an access key that MinIO takes
URL = re.compile(r"s3://(?P<name>[a-z0-9.-]{3,63})@(?P<host>[^/?@]+)/?(\?secure=(?P<secure>[01]))?")


class KeysUnavailable(Told, OSError):
    """The store has no such API, does not answer, or does not let us; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Of ETUDE_OBJECTS, seen by ETUDE_S3_ACCESS_KEY, which must be an administrator's. Each method raises KeysUnavailable."""

    name: str
    host: str
    secure: bool
    key: str
    secret: str = field(repr=False)

    @classmethod
    def parse(cls, settings: ServiceSettings) -> Bucket:
        match = URL.fullmatch(settings.objects_url)
        if not match:
            raise KeysUnavailable(
                f"objects (ETUDE_OBJECTS): found {without_credentials(settings.objects_url)!r}, which has no keys; allowed here: "
                "s3://BUCKET@HOST:PORT, s3://BUCKET@HOST:PORT?secure=1"
            )
        key, secret = settings.s3_access_key.get_secret_value(), settings.s3_secret_key.get_secret_value()
        return cls(match["name"], match["host"], match["secure"] == "1", key, secret)

    def users(self) -> dict[str, str]:
        """Of every user, the policies that it has, joined by commas."""
        with self._admin() as admin:
            return {name: one.get("policyName", "") for name, one in json.loads(admin.user_list()).items()}

    def give(self, user: str, secret: str) -> None:
        """The user is there with this secret, made where it was not."""
        if not NAMES[0] <= len(user) <= NAMES[1]:
            raise KeysUnavailable(
                f"--users: found {user!r}, {len(user)} characters; MinIO takes {NAMES[0]} to {NAMES[1]}: choose another beginning"
            )
        with self._admin() as admin:
            admin.user_add(user, secret)

    def apply(self, begin: str) -> list[str]:
        """Every policy as declared, and each the only one of its user; returns those that have a user."""
        given = []
        with self._admin() as admin:
            known, users = json.loads(admin.policy_list()), json.loads(admin.user_list())
            self._refuse_strangers(known, begin)
            for who, keys in OBJECTS.items():
                admin.policy_add(f"{begin}{who}", policy=policy(keys, self.name))
                if f"{begin}{who}" in users:
                    admin.policy_set(f"{begin}{who}", user=f"{begin}{who}")
                    given.append(who)
        return given

    def differences(self, begin: str) -> list[str]:
        """What is not as declared, in words."""
        with self._admin() as admin:
            known, users = json.loads(admin.policy_list()), json.loads(admin.user_list())
        wrong = []
        for who, keys in OBJECTS.items():
            name, wanted = f"{begin}{who}", policy(keys, self.name)
            if name not in known:
                wrong.append(f"{name}: no such policy")
            elif _statements(known[name]) != _statements(wanted):
                wrong.append(f"{name}: its policy is another than the declared one (`etude access s3 policy {who}`)")
            if name not in users:
                wrong.append(f"{name}: no such user")
            elif (has := users[name].get("policyName", "")) != name:
                wrong.append(f"{name}: has {f'the policies {has}' if has else 'no policy'}; declared: {name}")
        return wrong

    def _refuse_strangers(self, known: dict[str, Any], begin: str) -> None:
        """Another platform's policies of the same name are left alone."""
        for who in OBJECTS:
            there = known.get(f"{begin}{who}")
            if there and not all(_of(resource, self.name) for one in _statements(there) for resource in one[2]):
                raise KeysUnavailable(
                    f"--users: found {begin!r}; {self.host} has a policy {begin + who!r} that is of another bucket than "
                    f"{self.name!r}: choose another beginning for this platform's users"
                )

    @contextmanager
    def _admin(self) -> Iterator[MinioAdmin]:
        import certifi
        import urllib3
        from minio.credentials import StaticProvider
        from minio.error import MinioAdminException
        from minio.minioadmin import MinioAdmin

        if not self.key or not self.secret:
            raise KeysUnavailable("objects: s3:// needs credentials: set ETUDE_S3_ACCESS_KEY and ETUDE_S3_SECRET_KEY")
        http = urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=CONNECT_S, read=READ_S), retries=1, ca_certs=certifi.where()
        )
        where = f"objects (ETUDE_OBJECTS): {self.host}"
        own = "Way out, where it is another S3 than MinIO: `etude access s3 policy SERVICE` prints what its tools take"
        try:
            provider = StaticProvider(self.key, self.secret)
            yield MinioAdmin(endpoint=self.host, credentials=provider, secure=self.secure, http_client=http)
        except MinioAdminException as error:
            said = str(error)
            if "AccessDenied" in said:
                raise KeysUnavailable(
                    f"{where}: key {self.key!r} may not manage users; use an administrator's"
                ) from None
            raise KeysUnavailable(f"{where}: {said}. {own}") from None
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise KeysUnavailable(f"{where}: {reason}. Is the address right, does it run? {own}") from None


def _statements(document: dict[str, Any]) -> set[tuple[str, frozenset[str], frozenset[str]]]:
    """Whatever the order and the form; conditions are none of ours, and make a statement another one."""

    def many(value: Any) -> frozenset[str]:
        return frozenset([value] if isinstance(value, str) else value or ())

    return {
        (
            one.get("Effect", "") + json.dumps(one.get("Condition") or {}),
            many(one.get("Action")),
            many(one.get("Resource")),
        )
        for one in document.get("Statement", ())
    }


def _of(resource: str, bucket: str) -> bool:
    return resource.removeprefix("arn:aws:s3:::").partition("/")[0] == bucket
