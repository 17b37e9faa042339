"""Requests to a cluster's API, and its errors as ours: every one of them is SandboxUnavailable, infrastructure, never a reward."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from shared.sandbox import SandboxUnavailable
from shared.sandbox.containers import labels
from shared.sandbox.pods.objects import CONTAINER, VERSION

TIMEOUT_S = 60.0  # one request
_HEARTBEAT_S = (
    20.0  # a connection that says nothing for this long is asked; two load balancers in three give up after a minute
)


class Missing(SandboxUnavailable):
    """The cluster does not have the object."""


class Api:
    """One namespace of a cluster. For one event loop."""

    def __init__(self, namespace: str, client: Any, streaming: Any, custom: Any, core: Any, exec_core: Any) -> None:
        self.namespace = namespace
        self._client, self._streaming = client, streaming
        self._custom, self._core, self._exec = custom, core, exec_core

    async def create(self, kind: tuple[str, str], body: dict[str, Any]) -> dict[str, Any]:
        group, plural = kind
        async with spoken_for(f"creating one of {plural}.{group}"):
            return dict(
                await self._custom.create_namespaced_custom_object(
                    group, VERSION, self.namespace, plural, body, field_validation="Strict", _request_timeout=TIMEOUT_S
                )
            )

    async def get(self, kind: tuple[str, str], name: str) -> dict[str, Any]:
        """Raises Missing, SandboxUnavailable."""
        group, plural = kind
        async with spoken_for(f"{plural}.{group} {name}"):
            return dict(
                await self._custom.get_namespaced_custom_object(
                    group, VERSION, self.namespace, plural, name, _request_timeout=TIMEOUT_S
                )
            )

    async def ours(self, kind: tuple[str, str]) -> list[dict[str, Any]]:
        """Return the objects that Étude made."""
        group, plural = kind
        async with spoken_for(f"listing {plural}.{group}"):
            found = await self._custom.list_namespaced_custom_object(
                group,
                VERSION,
                self.namespace,
                plural,
                label_selector=f"{labels.KIND}=sandbox",
                _request_timeout=TIMEOUT_S,
            )
            return list(found["items"])

    async def delete(self, kind: tuple[str, str], name: str) -> bool:
        """Return whether this call deleted it, and not another one before."""
        group, plural = kind
        try:
            async with spoken_for(f"deleting {plural}.{group} {name}"):
                await self._custom.delete_namespaced_custom_object(
                    group, VERSION, self.namespace, plural, name, _request_timeout=TIMEOUT_S
                )
        except Missing:
            return False
        return True

    async def pod(self, name: str) -> dict[str, Any]:
        """Return a pod as the API writes it. Raises Missing, SandboxUnavailable."""
        async with spoken_for(f"pod {name}"):
            # The client's models refuse what a newer or older server writes; the plain text does not.
            read = self._core.read_namespaced_pod_without_preload_content
            answer = await read(name, self.namespace, _request_timeout=TIMEOUT_S)
            text = await answer.read()
        if answer.status != 200:
            raise _told(f"pod {name}", int(answer.status), text.decode(errors="replace"))
        return dict(json.loads(text))

    async def execute(self, pod: str, command: Sequence[str]) -> Any:
        """Start a program in a pod. Return the websocket to its standard streams."""
        async with spoken_for(f"starting a program in pod {pod}"):
            async with asyncio.timeout(TIMEOUT_S):
                asked = await self._exec.connect_get_namespaced_pod_exec_without_preload_content(
                    pod,
                    self.namespace,
                    command=list(command),
                    container=CONTAINER,
                    stdin=True,
                    stdout=True,
                    stderr=True,
                    tty=False,
                )
                return await asked

    async def close(self) -> None:
        await asyncio.gather(self._client.close(), self._streaming.close())


async def connect(namespace: str, kubeconfig: str = "") -> Api:
    """Connect as the file says; empty: as the pod's service account, else as KUBECONFIG or ~/.kube/config says. Raises
    SandboxUnavailable."""
    try:
        from kubernetes.aio import client, config
        from kubernetes.aio.stream import WsApiClient
    except ImportError:
        raise SandboxUnavailable(
            "sandboxes in pods need Étude's extra 'kubernetes': pip install 'etude[kubernetes]'"
        ) from None
    made = client.Configuration()
    try:
        try:
            if kubeconfig:
                raise config.ConfigException
            config.load_incluster_config(client_configuration=made)
        except config.ConfigException:
            await config.load_kube_config(kubeconfig or None, client_configuration=made)
    except (config.ConfigException, OSError, ValueError, TypeError) as error:
        raise SandboxUnavailable(
            f"the cluster's API: {error}; run the worker in a pod with a service account, or set KUBECONFIG"
        ) from None
    plain, streaming = client.ApiClient(made), WsApiClient(made, heartbeat=_HEARTBEAT_S)
    return Api(
        namespace,
        plain,
        streaming,
        client.CustomObjectsApi(plain),
        client.CoreV1Api(plain),
        client.CoreV1Api(streaming),
    )


@contextlib.asynccontextmanager
async def spoken_for(what: str) -> AsyncIterator[None]:
    """Turn errors of the API into SandboxUnavailable with a way out. `what` names the step for the reader."""
    import aiohttp
    from kubernetes.aio.client.exceptions import ApiException

    try:
        yield
    except ApiException as error:
        raise _told(what, int(error.status or 0), str(error.body or error.reason or "")) from None
    except aiohttp.WSServerHandshakeError as error:
        raise _told(what, error.status, error.message) from None
    except TimeoutError:
        raise SandboxUnavailable(f"{what}: the cluster's API did not answer within {TIMEOUT_S:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise SandboxUnavailable(f"{what}: the cluster's API does not answer: {error}") from None


def _told(what: str, status: int, text: str) -> SandboxUnavailable:
    if status == 404:
        return Missing(f"{what}: the cluster has none; is agent-sandbox installed ({text:.200})?")
    if status in (401, 403):
        return SandboxUnavailable(
            f"{what}: this service account may not ({text:.200}); install the chart's Role: sandboxes.kubernetes.enabled=true"
        )
    return SandboxUnavailable(f"{what}: the cluster's API answered {status}: {text:.300}")
