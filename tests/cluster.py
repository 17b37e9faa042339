"""A Kubernetes API server for tests, with agent-sandbox: its pods are bubblewrap sandboxes on this machine in which the real first
process, loop and relay run.

It knows the requests that the adapter makes and refuses others. Objects are compared with the published schemas. No kubelet, no
controller and no container runtime is part of it: what they do is what their documentation says, and was tried on no cluster.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from shared.sandbox.containers import bundle
from shared.sandbox.contract import Limits
from shared.sandbox.inside.container import UID
from shared.sandbox.pods import install, objects
from shared.sandbox.pods.objects import CONTAINER, CORE, EXTENSIONS, VERSION, Cluster
from shared.sandbox.pods.sandboxes import PodSandboxes
from tests import missing
from tests.patience import patient
from tests.schemas import wrong

NAMESPACE = "sandboxes-of-a-test"
POOL = "small"
CLUSTER = Cluster(namespace=NAMESPACE, loader="registry.example/etude/worker:1")
_USERS = itertools.count(0x60030000 + (os.getpid() % 4096) * 64)  # of the host, which gives these ids to nobody
_SYSTEM = ("bin", "lib", "lib64", "sbin")


def need() -> None:
    if importlib.util.find_spec("kubernetes") is None:
        missing.skip(["Python client of Kubernetes"], "pip install 'etude[kubernetes]'")
    if shutil.which("bwrap") is None:
        missing.skip(["bubblewrap"], "apt-get install bubblewrap")


def sandboxes(image: str = f"pool:{POOL}", **options: Any) -> PodSandboxes:
    """Return the adapter, connected to the one server of this process."""
    need()
    return PodSandboxes(CLUSTER, image=image, kubeconfig=str(server().kubeconfig), **options)


@functools.cache
def server() -> FakeCluster:
    made = FakeCluster()
    atexit.register(made.stop)
    return made


@functools.cache
def loader() -> Path:
    """Return what the init container writes."""
    folder = Path(tempfile.mkdtemp(prefix="etude-loader-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    install.install(folder)
    return folder


class FakePod:
    """A pod's container in bubblewrap, with the mounts, the user and the command of its spec."""

    def __init__(self, name: str, spec: dict[str, Any]) -> None:
        self.spec, self.name = spec, name
        self.folder = Path(tempfile.mkdtemp(prefix="etude-pod-"))
        user = next(_USERS) if os.geteuid() == 0 else os.geteuid()
        self.folder.chmod(0o755)
        (container,) = spec["containers"]
        mounts: list[str] = []
        for mount in container["volumeMounts"]:
            mounts += self._mounted(mount, user)
        links = [part for name in _SYSTEM for part in _linked(name)]
        command = [
            *("bwrap", "--unshare-all", "--die-with-parent", "--as-pid-1", "--hostname", spec["hostname"]),
            *("--uid", str(UID), "--gid", str(UID), "--ro-bind", "/usr", "/usr", *links),
            *("--ro-bind", "/etc/passwd", "/etc/passwd", "--proc", "/proc", "--dev", "/dev"),
            *(*mounts, "--remount-ro", "/", "--chdir", container["workingDir"], "--clearenv"),
            *("--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin", "--setenv", "OF_THE_IMAGE", "1"),
            *container["command"],
        ]
        self.errors = (self.folder / "errors").open("wb")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            user=user,
            group=user,
            extra_groups=[],
            cwd="/",
        )
        self.lock = threading.Lock()

    @property
    def socket(self) -> Path:
        return self.folder / "layer" / "porter"

    def _mounted(self, mount: dict[str, Any], user: int) -> list[str]:
        name, place = mount["name"], mount["mountPath"]
        if name == "loop":
            return ["--ro-bind", str(loader() / mount["subPath"]), place]
        (volume,) = [one for one in self.spec["volumes"] if one["name"] == name]
        if volume["emptyDir"].get("medium") == "Memory":
            size = int(volume["emptyDir"]["sizeLimit"].removesuffix("Mi")) << 20
            return ["--perms", "1777", "--size", str(size), "--tmpfs", place]
        folder = self.folder / name / mount.get("subPath", "")
        folder.mkdir(parents=True)
        os.chown(folder, user, user)
        folder.chmod(0o777)
        return ["--bind", str(folder), place]

    def status(self) -> dict[str, Any]:
        code = self.process.poll()
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code, "reason": "Completed"}}
        phase = "Running" if code is None else "Succeeded"
        return {"phase": phase, "containerStatuses": [{"name": CONTAINER, "state": state}]}

    def end(self) -> None:
        with self.lock:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.errors.close()
            shutil.rmtree(self.folder, ignore_errors=True)


def _linked(name: str) -> list[str]:
    path = Path("/", name)
    if path.is_symlink():
        return ["--symlink", os.readlink(path), str(path)]
    return ["--ro-bind", str(path), str(path)] if path.is_dir() else []


class FakeCluster:
    """`found`: the objects, by plural and name. `pools`: name -> pod spec. `refuse`: a status that every request then gets."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, dict[str, Any]]] = {"sandboxes": {}, "sandboxclaims": {}}
        self.pods: dict[str, FakePod] = {}
        self.pools = {POOL: objects.pod("registry.example/small:1", Limits(memory_mb=2048), ["/opt/data"], CLUSTER)}
        self.refuse = 0
        self._numbers = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="fake-cluster")
        self._thread.start()
        assert self._began.wait(patient(60))
        folder = Path(tempfile.mkdtemp(prefix="etude-kubeconfig-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.kubeconfig = folder / "config"
        named = {"cluster": "c", "user": "u"}
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "x",
                    "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
                    "users": [{"name": "u", "user": {"token": "a token"}}],
                    "contexts": [{"name": "x", "context": named}],
                }
            )
        )

    def stop(self) -> None:
        for pod in list(self.pods.values()):
            pod.end()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(patient(30))

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._begin())
        self._began.set()
        self._loop.run_forever()

    async def _begin(self) -> None:
        app = web.Application(middlewares=[self._checked])
        custom = f"/apis/{{group}}/{VERSION}/namespaces/{NAMESPACE}/{{plural}}"
        app.router.add_post(custom, self._create)
        app.router.add_get(custom, self._list)
        app.router.add_get(custom + "/{name}", self._get)
        app.router.add_delete(custom + "/{name}", self._delete)
        app.router.add_get(f"/api/v1/namespaces/{NAMESPACE}/pods/{{name}}", self._pod)
        app.router.add_get(f"/api/v1/namespaces/{NAMESPACE}/pods/{{name}}/exec", self._execute)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.refuse:
            return _status(self.refuse, "refused by the test")
        if request.headers.get("Authorization") != "Bearer a token":
            return _status(401, "no token")
        known = {(EXTENSIONS, "sandboxclaims"), (CORE, "sandboxes")}
        about = request.match_info
        if "plural" in about and (about["group"], about["plural"]) not in known:
            return _status(404, "the server could not find the requested resource")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _create(self, request: web.Request) -> web.Response:
        plural, body = request.match_info["plural"], await request.json()
        if faults := wrong(f"{plural}.{request.match_info['group']}", body):
            return _status(422, "; ".join(faults))
        if request.query.get("fieldValidation") != "Strict":
            return _status(400, "the adapter always asks for strict validation")
        body["metadata"]["uid"] = f"uid-{next(self._numbers)}"
        name = body["metadata"]["name"]
        self.found[plural][name] = body
        if plural == "sandboxclaims":
            await self._adopt(body)
        else:
            await self._launch(body, name, body["spec"]["podTemplate"]["spec"])
        return web.json_response(body, status=201)

    async def _adopt(self, claim: dict[str, Any]) -> None:
        """As the controller does: a Sandbox of the pool becomes the claim's, and its pod has a name of its own."""
        pool = claim["spec"]["warmPoolRef"]["name"]
        if pool not in self.pools:
            _tell(claim, False, "WarmPoolNotFound", f"SandboxWarmPool {pool!r} not found")
            return
        number = next(self._numbers)
        name, pod = f"{pool}-{number}", f"pod-of-{pool}-{number}"
        owned = {"name": name, "annotations": {objects.POD_NAME: pod}, "claim": claim["metadata"]["name"]}
        adopted: dict[str, Any] = {"metadata": owned, "spec": {"podTemplate": {"spec": self.pools[pool]}}}
        self.found["sandboxes"][name] = adopted
        await self._launch(adopted, pod, self.pools[pool])
        claim.setdefault("status", {})["sandbox"] = {"name": name}
        _tell(claim, True, "Ready", "")

    async def _launch(self, sandbox: dict[str, Any], pod: str, spec: dict[str, Any]) -> None:
        if "no-such" in spec["containers"][0]["image"]:
            _tell(sandbox, False, "ImagePullBackOff", f"cannot pull {spec['containers'][0]['image']}")
            return
        made = self.pods[pod] = await asyncio.to_thread(FakePod, pod, spec)
        ends = time.monotonic() + patient(60)
        while not made.socket.exists() and made.process.poll() is None and time.monotonic() < ends:  # noqa: ASYNC110 a file
            await asyncio.sleep(0.01)
        _tell(sandbox, True, "Ready", "")

    async def _list(self, request: web.Request) -> web.Response:
        name, _, value = request.query["labelSelector"].partition("=")
        all_of = self.found[request.match_info["plural"]].values()
        return web.json_response(
            {"items": [one for one in all_of if one["metadata"].get("labels", {}).get(name) == value]}
        )

    async def _get(self, request: web.Request) -> web.Response:
        found = self.found[request.match_info["plural"]].get(request.match_info["name"])
        return web.json_response(found) if found else _status(404, "not found")

    async def _delete(self, request: web.Request) -> web.Response:
        plural, name = request.match_info["plural"], request.match_info["name"]
        found = self.found[plural].pop(name, None)
        if found is None:
            return _status(404, "not found")
        pod = name
        if plural == "sandboxclaims" and (inner := found.get("status", {}).get("sandbox")):
            pod = self.found["sandboxes"].pop(inner["name"])["metadata"]["annotations"][objects.POD_NAME]
        if pod in self.pods:
            await asyncio.to_thread(self.pods.pop(pod).end)
        return web.json_response({"status": "Success"})

    async def _pod(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _status(404, "not found")
        metadata = {"name": pod.name, "namespace": NAMESPACE}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod.spec, "status": pod.status()}
        return web.json_response(body)

    async def _execute(self, request: web.Request) -> web.StreamResponse:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _status(404, "not found")
        query = request.query
        if query.getall("command") != bundle.command("shared.sandbox.inside.relay") or query["container"] != CONTAINER:
            return _status(400, "the adapter starts nothing but the relay")
        if {query.get(name) for name in ("stdin", "stdout", "stderr")} - {"true", "True"}:
            return _status(400, "found a stream that is not asked for")
        answer = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await answer.prepare(request)
        assert answer.ws_protocol == "v4.channel.k8s.io"
        await _relayed(answer, pod)
        return answer


async def _relayed(socket: web.WebSocketResponse, pod: FakePod) -> None:
    """As a kubelet does: a program's standard streams over a websocket. Its input ends with the connection."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "shared.sandbox.inside.relay", str(pod.socket)]
    relay = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    assert relay.stdin is not None

    async def out(stream: asyncio.StreamReader, channel: int) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await stream.read(1 << 15):
                await socket.send_bytes(bytes([channel]) + data)

    async def told() -> None:
        assert relay.stdout is not None
        assert relay.stderr is not None
        await asyncio.gather(out(relay.stdout, 1), out(relay.stderr, 2))
        status = {"status": "Success"} if await relay.wait() == 0 else {"status": "Failure"}
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(b"\3" + json.dumps(status).encode())
        await socket.close()

    telling = asyncio.create_task(told())
    async for message in socket:
        if message.type == WSMsgType.BINARY and message.data[:1] == b"\0":
            relay.stdin.write(message.data[1:])
            with contextlib.suppress(ConnectionError):
                await relay.stdin.drain()
    relay.stdin.close()
    await telling


def _tell(found: dict[str, Any], ready: bool, reason: str, message: str) -> None:
    condition = {"type": "Ready", "status": str(ready), "reason": reason, "message": message}
    found.setdefault("status", {})["conditions"] = [condition]


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "message": message, "code": code}, status=code)


def left() -> Sequence[str]:
    """Return what is still in the cluster."""
    return [*server().found["sandboxes"], *server().found["sandboxclaims"], *server().pods]
