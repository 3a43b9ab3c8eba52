"""From a DynamoGraphDeployment to a configuration for one host: commands, variables, the planner, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from dynamo_local.errors import BadInput, ConfigError
from dynamo_local.kubernetes.import_graph import read_documents
from dynamo_local.kubernetes.manifests import NotCarried
from tests.unit.kubernetes.manifests.carried import BESIDE, VLLM, component, imported, manifest, section, told, worker

# --- commands --------------------------------------------------------------------------------------


def test_a_component_becomes_a_command_with_its_workers_and_gpus() -> None:
    resources = {"limits": {"nvidia.com/gpu": "2", "memory": "250Gi"}, "requests": {"memory": "200Gi", "cpu": "8"}}
    more = {"replicas": 3}
    pod = {"terminationGracePeriodSeconds": 90}
    found = section(manifest(worker(resources=resources, own=more, pod=pod)))
    assert found == {
        "command": [*VLLM, "--model", "{model}"],
        "role": "aggregated",
        "runtime": "dynamo-1x",
        "model": "org/name",
        "ServiceArgs": {
            "workers": 3,
            "drain-deadline-s": 90,
            "resources": {"gpu": 2, "cpu": "8", "memory": "250Gi"},
        },
    }


@pytest.mark.parametrize(
    ("main", "words"),
    [
        ({}, ["python3", "-m", "dynamo.frontend"]),
        ({"args": ["-m", "dynamo.frontend", "--router-mode", "kv"]}, ["--router-mode", "kv"]),
        ({"command": ["python3", "-m", "dynamo.frontend"], "args": ["--http-port", "9000"]}, ["dynamo.frontend"]),
    ],
)
def test_a_frontend_is_what_the_operator_starts(main: dict[str, Any], words: list[str]) -> None:
    found = section(manifest(component("Frontend", "frontend", **main)), "Frontend")
    assert found["command"][-len(words) :] == words
    assert found["ports"] == {"http": 9000 if "--http-port" in str(main) else 8000}
    assert found["role"] == "frontend"


def test_a_shells_single_command_is_its_words() -> None:
    script = "exec python3 -m dynamo.vllm --model $MODEL --served-model-name ${NAME} --x '{\"a\":1}'"
    env = [{"name": "MODEL", "value": "org/name"}, {"name": "NAME", "value": "n"}]
    for main in ({"args": [script]}, {"command": ["/bin/sh", "-c"], "args": [script]}):
        words = section(manifest(component(env=env, **main)))["command"]
        assert words == [*VLLM, "--model", "{model}", "--served-model-name", "n", "--x", '{"a":1}']


def test_a_shells_arguments_stand_where_it_puts_them() -> None:
    script = 'exec python3 -m dynamo.vllm "$@" --enforce-eager'
    found = section(manifest(component(command=["/bin/sh", "-c", script, "--"], args=["--model", "org/name"])))
    assert found["command"] == [*VLLM, "--model", "{model}", "--enforce-eager"]


def test_variables_before_a_shells_program_are_the_components() -> None:
    script = "A=1 NVIDIA_VISIBLE_DEVICES=0 python3 -m dynamo.vllm --model org/name"
    found = imported(manifest(component(command=["bash", "-c", script])))
    assert found.sections["W"]["command"][:3] == VLLM
    assert found.sections["W"]["ServiceArgs"]["envs"] == {"A": "1"}
    assert "W.command.NVIDIA_VISIBLE_DEVICES" in told(found.notes, "left out")


def test_how_the_clusters_processes_find_one_another_does_not_carry_over() -> None:
    """Here they would not find one another at all."""
    env = [{"name": "DYN_DISCOVERY_BACKEND", "value": "kubernetes"}, {"name": "DYN_STORE_KV", "value": "mem"}]
    found = imported(manifest(worker(["--model", "m", "--store-kv", "mem", "--discovery-backend=file"], env=env)))
    assert found.sections["W"]["command"] == [*VLLM, "--model", "{model}"]
    assert "envs" not in found.sections["W"]["ServiceArgs"]
    places = {"W.env.DYN_DISCOVERY_BACKEND", "W.env.DYN_STORE_KV", "W.--store-kv", "W.--discovery-backend"}
    assert places <= set(told(found.notes, "left out"))


def test_variables_in_words_are_filled_in_as_kubernetes_does() -> None:
    env = [
        {"name": "A", "value": "1"},
        {"name": "B", "value": "$(A)2"},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    args = ["--b", "$(B)", "--ip=$(IP)", "$$(A)", "--in", "$(DYN_NAMESPACE)/$(POD_NAME)"]
    found = section(manifest(worker(args, env=env)))
    assert found["command"][3:] == ["--b", "12", "--ip=127.0.0.1", "$(A)", "--in", "{namespace}/{watcher}"]


@pytest.mark.parametrize(
    ("types", "modes", "roles"),
    [
        (("worker", "worker"), ("decode", "prefill"), ("decode", "prefill")),
        (("decode", "prefill"), (None, "prefill"), ("decode", "prefill")),
        (("worker", "prefill"), (None, "prefill"), ("decode", "prefill")),
        (("decode",), (None,), ("aggregated",)),
        (("worker",), ("agg",), ("aggregated",)),
    ],
)
def test_a_workers_role_is_what_its_command_says_else_what_the_graph_is(
    types: tuple[str, ...], modes: tuple[str | None, ...], roles: tuple[str, ...]
) -> None:
    """Dynamo's own aggregated examples have a lone worker of type decode."""
    workers = []
    for n, (kind, mode) in enumerate(zip(types, modes, strict=True)):
        args = ["--model", "m", *(() if mode is None else ("--disaggregation-mode", mode))]
        workers.append(component(f"W{n}", kind, command=VLLM, args=args))
    found = imported(manifest(*workers)).sections
    assert tuple(found[f"W{n}"]["role"] for n in range(len(types))) == roles


def test_ports_that_pods_share_are_each_workers_own_here() -> None:
    args = ["--model", "m", "--kv-events-config", '{"endpoint":"tcp://*:20080"}', "--disaggregation-mode", "prefill"]
    found = section(manifest(worker(args, env=[{"name": "SOME_PORT", "value": "4444"}])))
    assert found["command"][:3] == ["env", "SOME_PORT={port:some}", "VLLM_NIXL_SIDE_CHANNEL_PORT={port:nixl}"]
    assert '{"endpoint":"tcp://*:{port:events}"}' in found["command"]


def test_one_model_of_all_is_common() -> None:
    workers = [
        component(f"W{n}", command=VLLM, args=["--model=org/name", "--disaggregation-mode", mode])
        for n, mode in enumerate(("decode", "prefill"))
    ]
    found = imported(manifest(*workers)).sections
    assert found["Common"] == {"model": "org/name"}
    assert [(found[name]["common-configs"], "--model={model}" in found[name]["command"]) for name in ("W0", "W1")] == [
        (["model"], True),
        (["model"], True),
    ]


# --- variables -------------------------------------------------------------------------------------


def test_secrets_come_from_the_shell() -> None:
    """A value that the cluster holds is told by name; what `dynamo serve` passes on anyway needs no word."""
    env = [{"name": name, "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}} for name in ("AWS_KEY", "HF_TOKEN")]
    found = imported(manifest(worker(env=env, envFrom=[{"secretRef": {"name": "hf"}}])))
    assert found.sections["Host"] == {"pass-env": ["AWS_KEY"]}
    assert set(told(found.notes, "secret")) == {"W.env.AWS_KEY", "W.env.HF_TOKEN", "W.envFrom"}
    assert "ServiceArgs" not in found.sections["Host"]


def test_config_maps_of_the_same_file_are_read() -> None:
    maps = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"k": "v", "OTHER": "o"}}
    env = [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]
    missing = [{"name": "B", "valueFrom": {"configMapKeyRef": {"name": "away", "key": "k"}}}]
    text = manifest(worker(env=[*env, *missing], envFrom=[{"configMapRef": {"name": "c"}}]))
    found = imported(f"{yaml.safe_dump(maps)}---\n{text}")
    assert found.sections["W"]["ServiceArgs"]["envs"] == {"A": "v", "k": "v", "OTHER": "o"}
    assert "away, which is not in this file" in told(found.notes, "left out")["W.env.B"]


def test_variables_of_the_whole_graph_are_each_components_and_the_clusters_own_are_left_out() -> None:
    of_all = [
        {"name": "A", "value": "all"},
        {"name": "B", "value": "all"},
        {"name": "OTEL_ENDPOINT", "value": "http://tempo.observability.svc.cluster.local:4317"},
        {"name": "DYN_SYSTEM_PORT", "value": "9090"},
        {"name": "ETCD_ENDPOINTS", "value": "http://etcd:2379"},
    ]
    found = imported(manifest(worker(env=[{"name": "A", "value": "own"}]), env=of_all))
    assert found.sections["W"]["ServiceArgs"]["envs"] == {"A": "own", "B": "all"}
    assert {"W.env.OTEL_ENDPOINT", "W.env.DYN_SYSTEM_PORT", "W.env.ETCD_ENDPOINTS"} <= set(
        told(found.notes, "left out")
    )


# --- the planner -----------------------------------------------------------------------------------


def planner(*args: str, module: str = "dynamo.planner") -> dict[str, Any]:
    """A planner's component."""
    return component("Planner", "planner", command=["python3", "-m", module], args=list(args))


def test_dynamos_planner_is_the_policy_of_the_same_options() -> None:
    options = '{"environment": "kubernetes", "max_gpu_budget": 4, "profile_results_dir": "/data/x", "strange": 1}'
    found = imported(manifest(worker(), planner("--config", options)))
    assert found.sections["Planner"] == {"policy": "throughput-load", "max_gpu_budget": 4}
    assert {"Planner.profile_results_dir", "Planner.strange"} <= set(told(found.notes, "left out"))


def test_a_planners_options_may_stand_one_by_one() -> None:
    found = imported(manifest(worker(), planner("--environment=kubernetes", "--max-gpu-budget", "4")))
    assert found.sections["Planner"]["max_gpu_budget"] == 4


def test_our_own_planner_to_which_no_policy_is_named_plans_as_it_did_in_its_pod() -> None:
    part = planner("--config", '{"ttft_ms": 200, "itl_ms": 20}', module="dynamo_local.planner")
    section = imported(manifest(worker(), part)).sections["Planner"]
    assert section == {"policy": "throughput-load", "ttft_ms": 200, "itl_ms": 20}


def test_dynamos_first_planner_is_the_policy_sla() -> None:
    part = planner("--environment=kubernetes", "--backend=vllm", "--adjustment-interval=60", module="planner_sla")
    section = imported(manifest(worker(), part)).sections["Planner"]
    assert section == {"policy": "sla", "backend": "vllm", "adjustment_interval": 60}


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (planner("--config", "/etc/planner.yaml"), None),
        (planner("--config", '{"max_gpu_budget": -3}'), "do not go together"),
        (planner(module="dynamo.global_planner"), "no planner here"),
        (component("Planner", "planner"), "no command"),
    ],
)
def test_a_planner_that_cannot_be_is_left_out_and_told(part: dict[str, Any], why: str | None) -> None:
    found = imported(manifest(worker(), part))
    assert ("Planner" in found.sections) is (why is None)
    assert why is None or why in told(found.notes, "left out")["Planner"]


# --- what is told, and what is refused ---------------------------------------------------------------


def test_every_field_that_says_nothing_here_is_told() -> None:
    text = manifest(
        worker(
            workingDir="/workspace",
            livenessProbe={"httpGet": {"port": 1}},
            somethingNew=1,
            resources={"requests": {"ephemeral-storage": "2Gi"}},
            pod={"tolerations": [{"key": "a"}], "initContainers": [{"name": "i"}]},
            own={"sharedMemorySize": "2Gi", "replicas": 1},
        ),
        worker(own={"replicas": 0}) | {"name": "Asleep"},
        topologyConstraint={"clusterTopologyName": "t"},
    )
    places = set(told(imported(text).notes, "left out"))
    main = {"W.main.workingDir", "W.main.livenessProbe", "W.main.somethingNew", "W.resources.ephemeral-storage"}
    assert places == {
        *main,
        *("W.pod.tolerations", "W.pod.initContainers", "W.sharedMemorySize", "Asleep", "spec.topologyConstraint"),
    }


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (component("Epp", "epp"), "belongs to a gateway"),
        (worker(own={"frontendSidecar": "x"}), "sidecar that takes"),
        (worker(own={"multinode": {"nodeCount": 2}}), "spans 2 nodes"),
        (worker(own={"experimental": {"gpuMemoryService": {}}}), "share a GPU's memory"),
        (worker(own={"experimental": {"failover": {}}}), "second engine on the same GPU"),
        (worker(own={"experimental": {"checkpoint": {"enabled": True}}}), "start from a checkpoint"),
        (worker(resources={"claims": [{"name": "gpu"}]}), "resource claim"),
        (worker(pod={"resourceClaims": [{"name": "gpu"}]}), "resource claim"),
        (worker(resources={"limits": {"gpu.intel.com/xe": "1"}}), "whole NVIDIA GPUs only"),
        (worker(resources={"limits": {"nvidia.com/gpu": "half"}}), "whole number of devices"),
        (worker(own={"device": {"resources": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}}}), "gpumem"),
        (component(), "it has no command"),
        (component(command=["/bin/sh", "-c"], args=["a; python3 -m dynamo.vllm"]), "more than one command"),
        (component(command=["/bin/bash", "run.sh"]), "a shell script"),
        (component(args=["python3 -m dynamo.vllm --model $MODEL"]), r"\$MODEL, which is not known"),
        (component(args=["python3 'open"]), "cannot be split"),
        (worker(["--key", "$(API_KEY)"]), "API_KEY: a secret"),
        (worker(["--template", "{model}"]), "placeholder"),
        (worker(["--disaggregation-mode", "encode"]), "encode is unknown"),
        (worker(["--multimodal-encode-worker"]), "one part of a multimodal worker"),
        (worker(pod={"containers": [{"name": "main", "command": VLLM}, BESIDE]}), "sidecar that takes"),
        (component(command=["vllm", "serve"]), "none of Dynamo's workers"),
        (component("W", "prefill", command=VLLM), "no --disaggregation-mode prefill"),
        (component("F", "frontend", command=["nginx"]), "a frontend here is"),
        (worker() | {"name": "etcd"}, "give the component another name"),
        (worker() | {"name": "Planner"}, "is a section of the configuration"),
        (worker(own={"replicas": 0}), "no component that can run"),
    ],
)
def test_what_cannot_run_on_one_host_is_refused_with_the_reason(part: dict[str, Any], why: str) -> None:
    with pytest.raises(NotCarried, match=why):
        imported(manifest(part))


def service(**keys: Any) -> str:
    main = {"command": VLLM, "args": ["--model", "org/name"]}
    graph = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "g"},
        "spec": {"services": {keys.pop("name", "W"): {"extraPodSpec": {"mainContainer": main}, **keys}}},
    }
    return yaml.safe_dump(graph, sort_keys=False)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (service(gpuMemoryService={"enabled": True}), "share a GPU's memory"),
        (service(failover={"enabled": True}), "second engine on the same GPU"),
        (service(frontendSidecar={"image": "x"}), "sidecar that takes"),
        (service(componentType="epp"), "belongs to a gateway"),
        (service(resources={"limits": {"gpu": "1", "gpuType": "gpu.intel.com/xe"}}), "whole NVIDIA GPUs only"),
        (service(multinode={"nodeCount": 4}), "spans 4 nodes"),
        (service(name="a_b"), "spec.services: 'a_b'"),
    ],
)
def test_the_older_version_is_refused_for_the_same_reasons(text: str, why: str) -> None:
    with pytest.raises(NotCarried, match=why):
        imported(text)


def test_the_older_version_has_its_own_places_for_the_same_things() -> None:
    resources = {"limits": {"gpu": "2", "cpu": "4"}, "requests": {"custom": {"ephemeral-storage": "2Gi"}}}
    envs = [{"name": "A", "value": "1"}]
    more = {"envFromSecret": "hf", "failover": {"enabled": False}, "type": "prefill"}
    found = imported(service(resources=resources, envs=envs, **more))
    args = found.sections["W"]["ServiceArgs"]
    assert (args["resources"], args["envs"]) == ({"gpu": 2, "cpu": "4"}, {"A": "1"})
    assert "the Secret hf" in told(found.notes, "secret")["W.envFrom"]
    assert {"W.resources.ephemeral-storage", "W.type (of v1beta1)"} <= set(told(found.notes, "left out"))


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(NotCarried) as refused:
        imported(manifest(component("A"), component("B", "epp"), worker()))
    assert [line.split(": ")[1] for line in str(refused.value).splitlines()] == ["A", "B"]


def test_what_serve_would_refuse_is_refused_now() -> None:
    many = worker(resources={"limits": {"nvidia.com/gpu": 4}}, own={"replicas": 3})
    with pytest.raises(NotCarried, match="max_gpu_budget is 8"):
        imported(manifest(many, planner("--config", "{}")))


# --- import files
# Files of manifests: one graph, and other objects beside it.


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no DynamoGraphDeployment"),
        ("a: [", "line 1"),
        ("a: \x00", "not YAML"),
        ("- 1", "without `kind`"),
        ("kind: 5", "without `kind`"),
        ("kind: Service", "kinds Service"),
        ("kind: DynamoGraphDeployment", "apiVersion is None"),
        ("kind: DynamoGraphDeployment\napiVersion: nvidia.com/v9", "known are"),
        (manifest(worker()).replace("name: W", "name: 'a b'"), "components.0.name"),
        (manifest(worker(), worker() | {"name": "w"}), "unique"),
        (manifest(worker()) + "---\n" + manifest(worker()).replace("name: g", "name: h"), "say --name"),
        ("kind: DynamoGraphDeployment\na: 2026-01-01", "date is not supported"),
        ("kind: DynamoGraphDeployment\na: &a [*a]", "line 2: an alias of something that holds it"),
        ("[" * 3000, "line 1: nested more than 50 deep"),
    ],
)
def test_what_is_no_manifest_is_refused_in_one_line(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        read_documents(text, "test")
    assert isinstance(refused.value, BadInput)
    assert len(str(refused.value).splitlines()) == 1


def test_of_several_graphs_one_is_chosen_by_name_and_lists_are_opened() -> None:
    both = [yaml.safe_load(manifest(worker()).replace("name: g", f"name: {name}")) for name in ("g", "h")]
    text = yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": both})
    assert read_documents(text, "test", "h").graph.metadata.name == "h"
    with pytest.raises(ConfigError, match="no DynamoGraphDeployment 'x' in it, but g, h"):
        read_documents(text, "test", "x")
