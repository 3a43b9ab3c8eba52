"""A real kube-apiserver with its etcd on loopback, as `tests/kube/build.sh` builds it. It stores, validates, versions
and authorizes; there is no controller, so the status of an object is written by a test."""

from __future__ import annotations

import json
import secrets
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dynamo_local.kubernetes.api import Answer, ApiAway, Transport, connected
from tests.fakes.kubernetes.api_server import Rule
from tests.tools.free_port import free_port

START_S = 300.0
STOP_S = 20.0
CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"


class RealKube:
    """Between `start` and `stop`. Stopped and started again it has the same port, token and objects."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.folder = folder
        self._binaries = binaries
        self._token = secrets.token_hex(16)
        self._port = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._accounts = 0
        self._kinds: list[str] = []

    def start(self) -> None:
        self._port = self._port or free_port()
        pki = self.folder / "pki"
        pki.mkdir(exist_ok=True)
        if not (pki / "sa.key").exists():
            subprocess.run(["openssl", "genrsa", "-out", pki / "sa.key", "2048"], check=True, capture_output=True)
        (self.folder / "tokens.csv").write_text(f'{self._token},admin,admin,"system:masters"\n')
        # The store listens on sockets in the folder, relative to the working directory: nobody else reaches it.
        store = (
            *(self._binaries / "etcd", "--data-dir", "etcd-data", "--unsafe-no-fsync"),
            *("--listen-client-urls", "unix://etcd:0", "--advertise-client-urls", "unix://etcd:0"),
            *("--listen-peer-urls", "unix://peer:0", "--initial-advertise-peer-urls", "unix://peer:0"),
            *("--initial-cluster", "default=unix://peer:0"),
        )
        server = (
            *(self._binaries / "kube-apiserver", "--etcd-servers=unix://etcd:0", "--bind-address=127.0.0.1"),
            *("--advertise-address=127.0.0.1", f"--secure-port={self._port}", "--cert-dir=pki"),
            *("--service-account-key-file=pki/sa.key", "--service-account-signing-key-file=pki/sa.key"),
            *(f"--service-account-issuer=https://127.0.0.1:{self._port}", "--token-auth-file=tokens.csv"),
            *("--authorization-mode=RBAC", "--service-cluster-ip-range=10.0.0.0/24"),
            *("--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none"),
        )
        for name, command in (("etcd", store), ("kube-apiserver", server)):
            with (self.folder / f"{name}.log").open("ab") as log:
                self._processes.append(
                    subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
                )
        self._until(self._ready, START_S, "the API server is ready")

    def stop(self) -> None:
        """End both, the store last. Stopping twice is no error."""
        while self._processes:
            process = self._processes.pop()
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)

    def hang(self, hung: bool) -> None:
        """The API server stands still, and answers nobody; or it goes on."""
        self._processes[1].send_signal(signal.SIGSTOP if hung else signal.SIGCONT)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self.emptied()

    def _ready(self) -> bool:
        for process in self._processes:
            assert process.poll() is None, f"a server has ended; its log is in {self.folder}"
        if not (self.folder / "pki/apiserver.crt").exists():
            return False
        return self._ask("GET", "/readyz")[0] == 200 and self._ask("GET", "/api/v1/namespaces/default")[0] == 200

    def install(self, crds: list[dict[str, Any]]) -> None:
        """Create them, and wait until the server serves their objects."""
        for crd in crds:
            status, said = self._ask("POST", CRD_PATH, crd)
            assert status == 201, said
        for crd in crds:
            spec = crd["spec"]
            version = next(one["name"] for one in spec["versions"] if one["storage"])
            path = f"/apis/{spec['group']}/{version}/namespaces/default/{spec['names']['plural']}"
            self._until(lambda path=path: self._ask("GET", path)[0] == 200, 60.0, f"{path} is served")
            self._kinds.append(path)

    def kubeconfig(self, token: str | None = None) -> Path:
        trusted = b64encode((self.folder / "pki/apiserver.crt").read_bytes()).decode()
        cluster = {"server": f"https://127.0.0.1:{self._port}", "certificate-authority-data": trusted}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "local", "cluster": cluster}],
            "users": [{"name": "user", "user": {"token": token or self._token}}],
            "contexts": [{"name": "local", "context": {"cluster": "local", "user": "user", "namespace": "default"}}],
            "current-context": "local",
        }
        path = self.folder / f"kubeconfig-{secrets.token_hex(4)}"
        path.write_text(json.dumps(config))
        return path

    def client(self, token: str | None = None) -> Transport:
        return connected(self.kubeconfig(token))

    async def account(self, rules: frozenset[Rule]) -> Transport:
        """A new service account that may do that, and nothing else."""
        return self.client(await self.token(rules))

    async def token(self, rules: frozenset[Rule]) -> str:
        """The token of a new service account that may do that, and nothing else."""
        self._accounts += 1
        name = f"planner-{self._accounts}"
        groups = {"leases": "coordination.k8s.io"}
        role = {
            "metadata": {"name": name},
            "rules": [
                {"apiGroups": [groups.get(resource, "nvidia.com")], "resources": [resource], "verbs": [verb]}
                for resource, verb in sorted(rules)
            ],
        }
        binding = {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "default"}],
        }
        accounts = "/api/v1/namespaces/default/serviceaccounts"
        token_request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        account = {"metadata": {"name": name}}
        made = ((accounts, account), (f"{RBAC}/roles", role), (f"{RBAC}/rolebindings", binding))
        for path, body in made:
            status, said = self._ask("POST", path, body)
            assert status == 201, said
        status, said = self._ask("POST", f"{accounts}/{name}/token", token_request)
        assert status == 201, said
        token = str(said["status"]["token"])
        await self._binding_holds(self.client(token), rules)
        return token

    async def _binding_holds(self, client: Transport, rules: frozenset[Rule]) -> None:
        end_s = time.monotonic() + 5.0
        while time.monotonic() < end_s:
            if all([await _may(client, resource, verb) for resource, verb in rules]):
                return
        raise AssertionError("the role does not hold")

    async def emptied(self) -> None:
        """Graphs, adapters and leases of the last test are removed."""
        admin = self.client()
        for where in (*self._kinds, "/apis/coordination.k8s.io/v1/namespaces/default/leases"):
            for left in reversed(range(5)):  # a busy machine may take longer than a planner waits
                try:
                    answer = await admin.request("DELETE", where)
                except ApiAway:
                    if not left:
                        raise
                else:
                    assert answer.status == 200, answer
                    break

    def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        context = ssl.create_default_context(cafile=str(self.folder / "pki/apiserver.crt"))
        request = urllib.request.Request(
            f"https://127.0.0.1:{self._port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10, context=context) as reply:
                text = reply.read().decode()
                return reply.status, json.loads(text) if text.startswith("{") else text
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def _until(self, done: Callable[[], bool], within_s: float, what: str) -> None:
        end_s = time.monotonic() + within_s
        while not done():
            assert time.monotonic() < end_s, f"not within {within_s:g} s: {what}; the logs are in {self.folder}"
            time.sleep(0.1)


async def _may(client: Transport, resource: str, verb: str) -> bool:
    plural, _, sub = resource.partition("/")
    group = "coordination.k8s.io" if plural == "leases" else "nvidia.com"
    attributes = {"namespace": "default", "verb": verb, "group": group, "resource": plural, "subresource": sub}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer: Answer = await client.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return answer.status == 201 and bool(answer.body["status"]["allowed"])
