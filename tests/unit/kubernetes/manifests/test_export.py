"""From a configuration to a DynamoGraphDeployment: what stands in it, what is refused, and what is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import yaml

from dynamo_local.kubernetes.export import ExportRequest
from dynamo_local.kubernetes.manifests import NotCarried, as_v1alpha1, document
from tests.tools.clean_imports import clean_imports
from tests.tools.crd_schemas import schema_faults
from tests.unit.kubernetes.manifests.carried import (
    EXAMPLES,
    PLANNED,
    WISH,
    components,
    env_of,
    exported,
    main_of,
    told,
    words_of,
)

FRONTEND = "Frontend: {command: python -m dynamo.frontend --router-mode kv, role: frontend, runtime: dynamo-1x}\n"
DISAGG = (
    FRONTEND
    + """
Decode:
  command: python -m dynamo.vllm --model {model} --disaggregation-mode decode
  role: decode
  runtime: dynamo-1x
  model: org/name
  ServiceArgs: {workers: 2, resources: {gpu: 2, cpu: 4, memory: 20GiB}, drain-deadline: 90.5}
Prefill:
  command: python -m dynamo.vllm --model {model} --disaggregation-mode prefill
  role: prefill
  runtime: dynamo-1x
  model: org/name
  ServiceArgs: {resources: {gpu: 1}}
"""
)
OWN = "graphs.disagg:Frontend"


def worker(keys: str, role: str = "decode", command: str = "python -m dynamo.vllm --model org/name") -> str:
    """A frontend and one worker with these further keys."""
    return f"{FRONTEND}W:\n  command: {command}\n  role: {role}\n  runtime: dynamo-1x\n{keys}"


@pytest.fixture(autouse=True)
def _clean_imports() -> Iterator[None]:
    with clean_imports():
        yield


# --- what stands in it -----------------------------------------------------------------------------


def test_roles_workers_gpus_and_words_are_those_of_the_configuration() -> None:
    found = components(exported(DISAGG))
    assert {name: (one["type"], one["replicas"]) for name, one in found.items()} == {
        "Frontend": ("frontend", 1),
        "Decode": ("decode", 2),
        "Prefill": ("prefill", 1),
    }
    assert main_of(found["Decode"])["resources"] == {
        "limits": {"nvidia.com/gpu": "2"},
        "requests": {"cpu": "4", "memory": "20Gi"},
    }
    expected = "python3 -m dynamo.vllm --model org/name --disaggregation-mode prefill"
    assert words_of(found["Prefill"]) == expected.split()
    assert found["Decode"]["podTemplate"]["spec"]["terminationGracePeriodSeconds"] == 91


@pytest.mark.parametrize("wish", [WISH, PLANNED], ids=["alone", "planned"])
@pytest.mark.parametrize(
    ("file", "target"),
    [
        ("dynamo_1x/agg.yaml", None),
        ("dynamo_1x/disagg.yaml", None),
        ("dynamo_1x/vllm_disagg.yaml", None),
        ("vllm_serve/agg.yaml", None),
        ("vllm_serve/disagg.yaml", None),
        ("llm/configs/llama-3.1-8b-agg.yaml", "graphs.agg:Frontend"),
        ("llm/configs/llama-3.1-8b-disagg.yaml", "graphs.disagg:Frontend"),
        ("llm/configs/qwen3-32b-agg.yaml", "graphs.agg:Frontend"),
        ("llm/configs/qwen3-32b-disagg.yaml", "graphs.disagg:Frontend"),
    ],
)
def test_every_example_is_valid_by_dynamos_own_schemas(file: str, target: str | None, wish: ExportRequest) -> None:
    found = exported((EXAMPLES / file).read_text(), wish, target=target)
    types = {one["type"] for one in components(found).values()}
    assert "frontend" in types
    assert types & {"worker", "decode"}
    assert schema_faults(document(found.graph)) == []
    assert schema_faults(document(as_v1alpha1(found.graph))) == []


def test_a_field_that_the_schema_does_not_have_is_noticed() -> None:
    """Else the test above would pass for anything."""
    broken = document(exported(DISAGG).graph)
    broken["spec"]["components"][0]["podTemplates"] = {}
    assert any("podTemplates" in fault for fault in schema_faults(broken))


def test_the_older_version_has_services_with_sub_types() -> None:
    graph = document(as_v1alpha1(exported(DISAGG, PLANNED).graph))
    services = graph["spec"]["services"]
    assert graph["apiVersion"] == "nvidia.com/v1alpha1"
    assert [(one["componentType"], one.get("subComponentType")) for one in services.values()] == [
        ("frontend", None),
        ("worker", "decode"),
        ("worker", "prefill"),
        ("planner", None),
    ]
    decode = services["Decode"]
    assert decode["resources"] == {"limits": {"gpu": "2"}, "requests": {"cpu": "4", "memory": "20Gi"}}
    assert decode["extraPodSpec"]["mainContainer"]["args"][:2] == ["--model", "org/name"]
    assert decode["scalingAdapter"] == {"enabled": True}


def test_a_planner_is_a_component_with_its_options_and_every_worker_has_an_adapter() -> None:
    """Generated manifests had a planner and nothing for it to act on (#6491)."""
    text = DISAGG + "Planner: {policy: slo, ttft: 200, itl: 20, enabled: false, actuators: [flip]}\n"
    found = exported(text, PLANNED)
    planner = components(found)["Planner"]
    assert words_of(planner) == [
        *("python3", "-m", "dynamo_local.planner", "--environment", "kubernetes"),
        *("--config", '{"policy": "slo", "ttft": 200, "itl": 20}'),
        *("--frontend", "http://graph-frontend:8000/metrics"),
    ]
    assert main_of(planner)["image"] == "planner:1"
    assert planner["podTemplate"]["spec"]["serviceAccountName"] == "graph-planner"
    account, role, binding = found.beside
    assert {one["metadata"]["name"] for one in found.beside} == {"graph-planner"}
    assert (account["kind"], binding["roleRef"]["name"]) == ("ServiceAccount", "graph-planner")
    example = EXAMPLES / "kubernetes/planner.yaml"
    assert role["rules"] in [one.get("rules") for one in yaml.safe_load_all(example.read_text())]
    assert exported(text).beside == ()
    assert {name for name, one in components(found).items() if "scalingAdapter" in one} == {"Decode", "Prefill"}
    assert {"Planner.enabled", "Planner.actuators"} <= set(told(found.notes, "left out"))
    assert not any("scalingAdapter" in one for one in components(exported(text)).values())


def test_a_planner_that_targets_have_chosen_is_named_to_its_pod() -> None:
    """A pod to which no policy is named plans as Dynamo does, and not as this host did."""
    planner = components(exported(DISAGG + "Planner: {ttft: 200, itl: 20}\n", PLANNED))["Planner"]
    assert '{"ttft": 200, "itl": 20, "policy": "slo"}' in words_of(planner)


def test_a_prefill_worker_is_told_that_it_is_one() -> None:
    """Without the option it registers as a decode worker, and no planner finds it (#13238)."""
    found = exported(worker("", role="prefill"))
    assert words_of(components(found)["W"])[-2:] == ["--disaggregation-mode", "prefill"]
    assert "--disaggregation-mode prefill was added" in told(found.notes, "changed")["W"]


def test_plain_vllm_servers_become_dynamos_workers() -> None:
    """A server's own address and its HTTP options have no place there."""
    text = """
W:
  command: >-
    env VLLM_NIXL_SIDE_CHANNEL_PORT={port:nixl} vllm serve org/name --host 127.0.0.1 --port {port:http}
    --api-key geheim --max-num-seqs 64 --enable-auto-tool-choice --tool-call-parser hermes
  role: prefill
  runtime: http
  served-model-name: name
  ServiceArgs: {resources: {gpu: 1}}
"""
    found = exported(text)
    assert words_of(components(found)["W"]) == [
        *("python3", "-m", "dynamo.vllm", "--model", "org/name", "--max-num-seqs", "64"),
        *("--dyn-tool-call-parser", "hermes", "--served-model-name", "name", "--disaggregation-mode", "prefill"),
    ]
    assert words_of(components(found)["Frontend"])[:3] == ["python3", "-m", "dynamo.frontend"]
    assert "geheim" not in str(document(found.graph)) + str(found.notes)


def test_own_workers_with_vllm_become_dynamos_workers_too() -> None:
    text = "Common: {model: org/name, engine: vllm}\nProcessor: {model: org/name, router: kv-load}\n" + "".join(
        f"{name}: {{common-configs: [model, engine], max-num-seqs: 8{more}, ServiceArgs: {{resources: {{gpu: 2}}}}}}\n"
        for name, more in {"VllmWorker": ", remote-prefill: true", "PrefillWorker": ""}.items()
    )
    found = exported(text, target=OWN)
    decode, prefill = (words_of(components(found)[name]) for name in ("VllmWorker", "PrefillWorker"))
    assert decode[:3] == ["python3", "-m", "dynamo.vllm"]
    assert decode[-2:], prefill[-2:] == (["--disaggregation-mode", "decode"], ["--disaggregation-mode", "prefill"])
    assert "--tensor-parallel-size=2" in decode
    assert any('"kv_role": "kv_both"' in word for word in decode)
    assert words_of(components(found)["Frontend"])[-2:] == ["--router-mode", "kv"]
    assert {"Processor", "VllmWorker.remote_prefill"} <= set(told(found.notes, "left out"))


# --- environment and secrets -----------------------------------------------------------------------


def test_a_secret_is_named_and_never_written() -> None:
    keys = """
  ServiceArgs:
    envs: {HF_TOKEN: secret1, PLAIN: "1", PROXY: "http://me:secret2@host/"}
"""
    command = "env MY_PASSWORD=secret3 python -m dynamo.vllm --model org/name --api-key secret4 --hf-token=secret5"
    found = exported(worker(keys, command=command))
    text = str(document(found.graph)) + str(found.notes)
    assert not [secret for n in range(1, 6) if (secret := f"secret{n}") in text]
    env = env_of(components(found)["W"])
    assert env["HF_TOKEN"] == {"secretKeyRef": {"name": "graph-secrets", "key": "HF_TOKEN"}}
    assert env["PLAIN"] == "1"
    words = words_of(components(found)["W"])
    assert words[-3:] == ["--api-key", "$(API_KEY)", "--hf-token=$(HF_TOKEN)"]
    assert set(found.secret_keys("graph-secrets")) == {"HF_TOKEN", "PROXY", "MY_PASSWORD", "API_KEY"}
    assert len(told(found.notes, "secret")) >= 4
    assert schema_faults(document(found.graph)) == []


def test_a_json_word_without_a_secret_is_left_as_it_is() -> None:
    command = """python -m dynamo.vllm --model m --kv-transfer-config '{"kv_connector":"X","kv_role":"kv_both"}'"""
    assert words_of(components(exported(worker("", command=command)))["W"])[-1] == (
        '{"kv_connector":"X","kv_role":"kv_both"}'
    )


def test_what_is_this_hosts_own_is_left_out_and_told() -> None:
    keys = """
  ServiceArgs:
    standby: 0
    start-deadline: 60
    envs: {ETCD_ENDPOINTS: "http://h:1", CUDA_VISIBLE_DEVICES: "0", DYN_HTTP_HOST: 127.0.0.1, DYN_LOG: debug}
Host: {gpus: "sim:8"}
"""
    found = exported(worker(keys))
    assert env_of(components(found)["W"])["DYN_LOG"] == "debug"
    envs = [f"W.ServiceArgs.envs.{name}" for name in ("ETCD_ENDPOINTS", "CUDA_VISIBLE_DEVICES", "DYN_HTTP_HOST")]
    args = ["W.ServiceArgs.standby", "W.ServiceArgs.start_deadline_s"]
    assert set(told(found.notes, "left out")) == {*envs, *args, "Host.gpus"}


def test_placeholders_are_filled_in_as_a_pod_has_them() -> None:
    """Each pod has all ports, its own name, and the operator's namespace; `$(X)` of the words stays what it was."""
    command = (
        "env VLLM_NIXL_SIDE_CHANNEL_PORT={port:nixl} python -m dynamo.vllm --model {model} --a {port:a} --b {port:b} "
        "--name {watcher}.{namespace} '$(X)'"
    )
    found = exported(worker("  model: /models/m\n  ports: {b: 20000}\n", command=command))
    words = words_of(components(found)["W"])
    assert words[3:] == [
        *("--model", "/models/m", "--a", "20001", "--b", "20000", "--name", "$(POD_NAME).$(DYN_NAMESPACE)", "$$(X)")
    ]
    env = env_of(components(found)["W"])
    assert env["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in env
    assert "folder of this host" in told(found.notes, "changed")["W.model"]


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (worker("", role="decode", command="python -m dynamo.vllm --disaggregation-mode prefill"), "make them agree"),
        (worker("", role="aggregated", command="python -m dynamo.vllm --is-prefill-worker"), "make them agree"),
        (worker("", command="./my-server --x"), "this program does not"),
        (FRONTEND + "W: {command: 'sleep 9', role: prefill}\n", "W: Dynamo 1.x's processes"),
        (FRONTEND + "W: {command: 'python -m dynamo.planner', role: decode}\n", "one of Dynamo's workers"),
        ("W: {command: 'sleep 9'}\n", "at least one component"),
        (worker("").replace("W:", "A_long_name_for_a_worker_of_this_graph_1a:"), "at most 45 may"),
        (worker("").replace("W:", "A_b:") + worker("").replace("W:", "A-b:").removeprefix(FRONTEND), "are named 'a-b'"),
    ],
)
def test_what_would_not_be_the_same_graph_is_refused_with_the_reason(text: str, why: str) -> None:
    """A manifest without a worker, or with a name that the webhook refuses, would only fail later."""
    with pytest.raises(NotCarried, match=why):
        exported(text)


def test_simulated_engines_are_refused() -> None:
    with pytest.raises(NotCarried, match="its engine is sim") as refused:
        exported((EXAMPLES / "llm/configs/disagg.yaml").read_text(), target=OWN)
    assert len(str(refused.value).splitlines()) == 2, "all reasons at once"


@pytest.mark.parametrize("name", ["Graph", "1graph", "g_h", "-g", "g" * 64, ""])
def test_a_name_that_kubernetes_does_not_take_is_refused(name: str) -> None:
    with pytest.raises(NotCarried, match="must begin with a small letter"):
        exported(FRONTEND, replace(WISH, name=name))


def test_names_are_measured_and_never_cut() -> None:
    """The operator cuts a graph's name that is too long, and who looks for its pods finds none (PR #12047)."""
    fits = 45 - len("Frontend")
    assert exported(FRONTEND, replace(WISH, name="g" * fits)).graph.metadata.name == "g" * fits
    with pytest.raises(NotCarried, match=r"take 46 characters.*shorten 'Frontend'"):
        exported(FRONTEND, replace(WISH, name="g" * (fits + 1)))
