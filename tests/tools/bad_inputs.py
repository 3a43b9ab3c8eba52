"""Broken graphs and configurations, each refused with its own one-line error and exit code 2.

Unit tests run each through `load_graph`, `load_config` and `resolve`; the command line's tests through
`dynamo serve`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_local.config import resolve
from dynamo_local.config.loading import load_config
from dynamo_local.core.types import GraphSpec
from dynamo_local.sdk.loader import load_graph

TARGET = "graphs.disagg:Frontend"

GOOD_COMPONENTS = """\
from pydantic import BaseModel
from dynamo_local.sdk import depends, endpoint, service


class WorkerOptions(BaseModel):
    model: str = "tiny"
    max_num_seqs: int = 16
    remote_prefill: bool = False
    ratio: float | None = None


@service(dynamo={"namespace": "dynamo"}, resources={"gpu": 1, "memory": "20Gi"})
class PrefillWorker:
    @endpoint()
    async def generate(self, request):
        yield request


@service(dynamo={"namespace": "dynamo"}, resources={"gpu": 1}, config=WorkerOptions)
class VllmWorker:
    prefill = depends(PrefillWorker, optional=True)

    @endpoint()
    async def generate(self, request):
        yield request


@service
class Processor:
    worker = depends(VllmWorker)

    @endpoint(name="chat/completions")
    async def chat(self, request):
        yield request


@service(dynamo={"namespace": "dynamo"})
class Frontend:
    processor = depends(Processor)
"""

GOOD_GRAPH = """\
from components import Frontend, PrefillWorker, Processor, VllmWorker

Frontend.link(Processor).link(VllmWorker).link(PrefillWorker)
"""

HEADER = "from dynamo_local.sdk import depends, endpoint, on_shutdown, service\n\n\n"


@dataclass(frozen=True)
class BadInput:
    """Files (relative name -> text) of a working folder, words after `dynamo serve`, environment, expected error."""

    id: str
    expect: str
    files: Mapping[str, str] = field(default_factory=dict)
    args: Sequence[str] = (TARGET,)
    env: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Put the files into `folder`; the good graph's where this input has none of its own."""
        for name, text in {"components.py": GOOD_COMPONENTS, "graphs/disagg.py": GOOD_GRAPH, **self.files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def resolve(self, folder: Path) -> GraphSpec:
        """What `dynamo serve` does with the input before it looks at the host."""
        target, *rest = self.args
        namespace, path, words = None, None, []
        while rest:
            word = rest.pop(0)
            if word == "-f":
                path = folder / rest.pop(0)
            elif word == "--namespace":
                namespace = rest.pop(0)
            else:
                words.append(word)
        graph = load_graph(target, base_dir=folder)
        return resolve(graph, load_config(path, env=self.env, overrides=words), namespace=namespace)


def _graph(id: str, expect: str, body: str, args: Sequence[str] = (TARGET,)) -> BadInput:
    """A graph of one file."""
    return BadInput(id, expect, {"graphs/disagg.py": HEADER + body}, args)


def _yaml(id: str, expect: str, text: str, *words: str) -> BadInput:
    """The good graph under a broken configuration file."""
    return BadInput(id, expect, {"c.yaml": text}, (TARGET, "-f", "c.yaml", *words))


def _words(id: str, expect: str, *words: str) -> BadInput:
    """The good graph under broken words on the command line."""
    return BadInput(id, expect, {}, (TARGET, *words))


GRAPHS = (
    BadInput("target_without_service", r"write module:Service", args=("graphs.disagg",)),
    BadInput("target_is_a_path", r"write module:Service", args=("graphs/disagg.py:Frontend",)),
    BadInput(
        "module_missing",
        r"no module 'graphs.disag'.*did you mean 'graphs.disagg:Frontend'\? graphs here: graphs.disagg:Frontend",
        args=("graphs.disag:Frontend",),
    ),
    BadInput(
        "folder_missing",
        r"no module 'grafs'.*did you mean 'graphs.disagg:Frontend'\?",
        args=("grafs.disagg:Frontend",),
    ),
    BadInput("attribute_missing", r"has no 'Fronted'.*did you mean 'Frontend'\?", args=("graphs.disagg:Fronted",)),
    _graph("not_a_service", r"is not a service but a plain class", "class Frontend:\n    pass\n"),
    _graph("not_a_class", r"is not a service but a int", "Frontend = 3\n"),
    _graph(
        "import_of_missing_package", r"disagg\.py:4: importing .* No module named 'no_such_pkg'", "import no_such_pkg\n"
    ),
    _graph("import_raises", r"disagg\.py:4: importing .* ZeroDivisionError", "1 / 0\n"),
    _graph("import_exits", r"disagg\.py:4: importing .* SystemExit: 7", "raise SystemExit(7)\n"),
    _graph("syntax_error", r"disagg\.py:4: importing .* SyntaxError", "class Frontend(:\n"),
    BadInput(
        "import_fails_below",
        r"components\.py:2: importing graphs\.disagg failed with KeyError: 'MODEL'",
        {"components.py": "import os\nMODEL = {}['MODEL']\n"},
    ),
    BadInput(
        "missing_dependency",
        r"Processor\.worker depends on VllmWorker.*link it, or depends\(VllmWorker, optional=True\)",
        {"graphs/disagg.py": "from components import Frontend, Processor\n\nFrontend.link(Processor)\n"},
    ),
    _graph(
        "two_of_one_name",
        r"disagg\.py:9: two services are named 'Worker'; the other is at .*disagg\.py:4",
        '@service\nclass Worker:\n    pass\n\n\n@service(name="Worker")\nclass Other:\n    pass\n\n\n'
        "@service\nclass Frontend:\n    a = depends(Worker)\n    b = depends(Other)\n",
    ),
    _graph(
        "names_differ_in_case",
        r"'Worker' .* and 'WORKER' differ only in case",
        "@service\nclass Worker:\n    pass\n\n\n@service\nclass WORKER:\n    pass\n\n\n"
        "@service\nclass Frontend:\n    a = depends(Worker)\n    b = depends(WORKER)\n",
    ),
    _graph("numbered_name", r"'Worker_1' ends in '_<number>'", "@service\nclass Worker_1:\n    pass\n"),
    _graph(
        "illegal_name", r"'Front\.end' is not a service name", "@service(name='Front.end')\nclass Frontend:\n    pass\n"
    ),
    _graph("name_of_embedded_server", r"'Etcd' is taken by the embedded server", "@service\nclass Etcd:\n    pass\n"),
    _graph("name_of_a_section", r"'Common' is a section", "@service\nclass Common:\n    pass\n"),
    _graph(
        "different_namespaces",
        r"Worker is in namespace 'b', but Frontend .* in 'a'",
        '@service(dynamo={"namespace": "b"})\nclass Worker:\n    pass\n\n\n'
        '@service(dynamo={"namespace": "a"})\nclass Frontend:\n    w = depends(Worker)\n',
    ),
    _graph(
        "illegal_namespace", r"namespace 'a\.b'", '@service(dynamo={"namespace": "a.b"})\nclass Frontend:\n    pass\n'
    ),
    _graph(
        "unknown_role",
        r"role 'decoder' is unknown.*'decode'",
        '@service(dynamo={"role": "decoder"})\nclass A:\n    pass\n',
    ),
    _graph(
        "unknown_dynamo_key",
        r"'namspace'.*did you mean 'namespace'",
        '@service(dynamo={"namspace": "a"})\nclass A:\n    pass\n',
    ),
    _graph("not_enabled", r"'enabled': False.*cannot run", '@service(dynamo={"enabled": False})\nclass A:\n    pass\n'),
    _graph(
        "unknown_resource",
        r"resources\.gpus is unknown.*'gpu'",
        '@service(resources={"gpus": 1})\nclass A:\n    pass\n',
    ),
    _graph(
        "fraction_of_a_gpu",
        r"whole number of devices per worker",
        '@service(resources={"gpu": 0.5})\nclass A:\n    pass\n',
    ),
    _graph("bad_memory", r"resources\.memory .*20Gi", '@service(resources={"memory": "much"})\nclass A:\n    pass\n'),
    _graph("no_workers", r"workers must be .* at least 1, not 0", "@service(workers=0)\nclass A:\n    pass\n"),
    _graph(
        "unknown_service_option",
        r"@service\(worker=…\) is unknown.*'workers'",
        "@service(worker=2)\nclass A:\n    pass\n",
    ),
    _graph(
        "config_is_no_model", r"config must be a pydantic model class", "@service(config=dict)\nclass A:\n    pass\n"
    ),
    _graph("envs_with_a_bool", r"envs\.DEBUG must be a string", "@service(envs={'DEBUG': True})\nclass A:\n    pass\n"),
    _graph(
        "endpoint_not_async",
        r"must be `async def`",
        "class A:\n    @endpoint()\n    def f(self, r):\n        return r\n",
    ),
    _graph(
        "endpoint_name",
        r"'a\.b' is not an endpoint name",
        "class A:\n    @endpoint(name='a.b')\n    async def f(self, r):\n        return r\n",
    ),
    _graph(
        "two_endpoints_of_one_name",
        r"two endpoints are named 'g': f and h",
        "@service\nclass A:\n    @endpoint(name='g')\n    async def f(self, r):\n        return r\n\n"
        "    @endpoint(name='g')\n    async def h(self, r):\n        return r\n",
    ),
    _graph(
        "depends_on_plain_class", r"not a service; decorate", "class B:\n    pass\n\n\nclass A:\n    b = depends(B)\n"
    ),
    _graph(
        "link_to_plain_class",
        r"Frontend\.link\(.*not a service",
        "@service\nclass Frontend:\n    pass\n\n\nFrontend.link(dict)\n",
    ),
    _graph(
        "link_to_itself",
        r"cannot be linked to itself",
        "@service\nclass Frontend:\n    pass\n\n\nFrontend.link(Frontend)\n",
    ),
)

CONFIGS = (
    BadInput(
        "file_missing",
        r"no configuration file .*disag\.yaml; did you mean 'disagg\.yaml'",
        {"disagg.yaml": ""},
        (TARGET, "-f", "disag.yaml"),
    ),
    _yaml("not_yaml", r"c\.yaml: line 3, column 1: not YAML", "Frontend:\n  port: [8000\n"),
    _yaml("list_at_top", r"c\.yaml: must be one section per service, not a list", "- Frontend\n"),
    _yaml("section_is_a_number", r"section 'Frontend' must hold keys and values, not 8000", "Frontend: 8000\n"),
    _yaml("duplicate_key", r"line 3: the key 'port' was given before, on line 2", "Frontend:\n  port: 1\n  port: 2\n"),
    _yaml("duplicate_section", r"line 3: the key 'Frontend' was given before", "Frontend:\n  port: 1\nFrontend: {}\n"),
    _yaml(
        "both_spellings",
        r"'max-num-seqs' and 'max_num_seqs' are one key",
        "VllmWorker:\n  max-num-seqs: 1\n  max_num_seqs: 2\n",
    ),
    _yaml("key_is_a_number", r"line 2: the key 8000 is not a string", "Frontend:\n  8000: port\n"),
    _yaml(
        "python_tag",
        r"line 1, column \d+: not YAML: could not determine a constructor",
        "Frontend: !!python/name:os.system x\n",
    ),
    _yaml("alias_of_itself", r"nested more than 50 deep, or an alias of itself", "Frontend: &a\n  b: *a\n"),
    _yaml("infinite_number", r"Frontend\.limit: inf is not a number", "Frontend:\n  limit: .inf\n"),
    _yaml("unknown_section", r"'VllmWorkr' is no service.*did you mean 'VllmWorker'", "VllmWorkr: {}\n"),
    _yaml("section_in_lower_case", r"'frontend' is no service.*did you mean 'Frontend'", "frontend:\n  port: 1\n"),
    _yaml(
        "unknown_key",
        r"VllmWorker: unknown key 'max_num_seq'; allowed: .*; did you mean 'max_num_seqs'",
        "VllmWorker:\n  max-num-seq: 4\n",
    ),
    _yaml(
        "wrong_type",
        r"VllmWorker: max_num_seqs: must be a valid integer.*given 'ten' \(str\)",
        "VllmWorker:\n  max-num-seqs: ten\n",
    ),
    _yaml(
        "bool_is_no_number",
        r"VllmWorker: max_num_seqs must be a whole number, given True",
        "VllmWorker:\n  max-num-seqs: yes\n",
    ),
    _yaml(
        "number_is_no_string",
        r"VllmWorker: model: must be a valid string \(put it in quotes.*given 7",
        "VllmWorker:\n  model: 7\n",
    ),
    _yaml(
        "unknown_service_arg",
        r"VllmWorker\.ServiceArgs: unknown key 'worker'; .*did you mean 'workers'",
        "VllmWorker:\n  ServiceArgs:\n    worker: 2\n",
    ),
    _yaml(
        "service_args_misspelt",
        r"unknown key 'service-args'; did you mean 'ServiceArgs'",
        "VllmWorker:\n  service-args: {workers: 2}\n",
    ),
    _yaml("service_args_is_a_number", r"ServiceArgs must hold workers", "VllmWorker:\n  ServiceArgs: 2\n"),
    _yaml(
        "workers_is_true",
        r"workers must be a whole number of at least 1, not True",
        "VllmWorker:\n  ServiceArgs: {workers: true}\n",
    ),
    _yaml(
        "workers_is_zero",
        r"workers must be .* at least 1, not 0; .* do not link it",
        "VllmWorker:\n  ServiceArgs: {workers: 0}\n",
    ),
    _yaml(
        "negative_gpu",
        r"resources\.gpu must be a whole number of devices per worker, not -1",
        "VllmWorker:\n  ServiceArgs: {resources: {gpu: -1}}\n",
    ),
    _yaml(
        "unknown_resource_key", r"resources\.gpus is unknown", "VllmWorker:\n  ServiceArgs: {resources: {gpus: 1}}\n"
    ),
    _yaml(
        "no_frontend",
        r"Frontend\.ServiceArgs: workers must be .* at least 1, not 0",
        "Frontend:\n  ServiceArgs: {workers: 0}\n",
    ),
    _yaml(
        "negative_deadline",
        r"drain_deadline_s: must be greater than 0",
        "VllmWorker:\n  ServiceArgs: {drain-deadline: -1}\n",
    ),
    _yaml("env_is_a_fraction", r"envs\.RATIO must be a string", "VllmWorker:\n  ServiceArgs: {envs: {RATIO: 1.10}}\n"),
    _yaml(
        "env_of_ours",
        r"envs\.DYN_NAMESPACE is set by dynamo serve itself",
        "VllmWorker:\n  ServiceArgs: {envs: {DYN_NAMESPACE: x}}\n",
    ),
    _yaml(
        "env_name",
        r"'NOT-A-NAME' is not a name of an environment variable",
        "VllmWorker:\n  ServiceArgs: {envs: {NOT-A-NAME: x}}\n",
    ),
    _yaml(
        "common_key_missing",
        r"lists 'modell', which Common does not have.*did you mean 'model'",
        "Common: {model: x}\nVllmWorker:\n  common-configs: [modell]\n",
    ),
    _yaml(
        "common_configs_is_text",
        r"common-configs must be a list",
        "Common: {model: x}\nVllmWorker:\n  common-configs: model\n",
    ),
    _yaml("common_with_service_args", r"Common is no service", "Common:\n  ServiceArgs: {workers: 2}\n"),
    _yaml("unknown_host_key", r"Host: unknown key 'gpu'.*did you mean 'gpus'", "Host:\n  gpu: sim:8\n"),
    _yaml("host_gpus", r"Host: gpus: must be sim:N", "Host:\n  gpus: {sim: 8}\n"),
    _yaml("host_address", r"Host: etcd_endpoints: must be addresses", "Host:\n  etcd_endpoints: localhost\n"),
    _yaml(
        "planner_key",
        r"Planner: unknown key 'adjustment_intervall'.*'adjustment_interval'",
        "Planner:\n  adjustment-intervall: 3\n",
    ),
    _yaml(
        "planner_thresholds",
        r"decode_kv_scale_down_threshold \(0\.95\) must be below",
        "Planner:\n  decode-kv-scale-down-threshold: 0.95\n",
    ),
    _yaml(
        "planner_engine_size",
        r"decode_engine_num_gpu is 2, but VllmWorker asks for 1",
        "Planner:\n  decode-engine-num-gpu: 2\n",
    ),
    _yaml(
        "planner_budget", r"max_gpu_budget is 1, but one worker of each role needs 2", "Planner:\n  max-gpu-budget: 1\n"
    ),
    _yaml(
        "planner_model",
        r"served_model_name is 'b', but Frontend serves 'a'",
        "Frontend: {served_model_name: a}\nPlanner: {served_model_name: b}\n",
    ),
    _yaml(
        "unknown_key_by_override",
        r"the command line: VllmWorker: unknown key 'max_seqs'",
        "VllmWorker: {model: x}\n",
        "--VllmWorker.max-seqs=1",
    ),
    BadInput("deployment_config", r"DYN_DEPLOYMENT_CONFIG: line 1.*not YAML", env={"DYN_DEPLOYMENT_CONFIG": "{"}),
    _words("stray_word", r"unexpected word 'stray'", "stray"),
    _words("stray_word_after_a_value", r"unexpected word 'stray'", "--VllmWorker.model", "x", "stray"),
    _words("override_without_service", r"unknown option '--workers=2'", "--workers=2"),
    _words("override_with_empty_part", r"'--VllmWorker\.\.workers=2' has an empty part", "--VllmWorker..workers=2"),
    _words("override_of_unknown_service", r"command line: the section 'Vllm' is no service", "--Vllm.model=x"),
    _words(
        "override_contradicts",
        r"contradicts an earlier --VllmWorker\.model",
        "--VllmWorker.model=x",
        "--VllmWorker.model.y=1",
    ),
    _words("env_without_value", r"has no value", "--VllmWorker.ServiceArgs.envs.FOO"),
    _words("single_dash", r"unexpected word '-x' after '--VllmWorker\.model'", "--VllmWorker.model", "-x"),
    _words("namespace_option", r"namespace 'a/b' is not usable", "--namespace", "a/b"),
)

BAD_INPUTS = GRAPHS + CONFIGS
