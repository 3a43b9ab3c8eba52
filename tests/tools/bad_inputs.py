"""Broken graphs and configurations, each refused with its own one-line error and exit code 2.

Unit tests run each through `load_graph`, `load_config` and `resolve`; the command line's tests through
`dynamo serve`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
        """Do what `dynamo serve` does with the input before it looks at the host."""
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


def _rows(text: str) -> Iterator[tuple[str, str, str]]:
    """`(id, expected error, input)` of each pair of lines; the input's line ends are written as in Python."""
    lines = text.strip("\n").splitlines()
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        name, _, expect = first.partition(": ")
        yield name, expect, second[4:].encode().decode("unicode_escape")


TARGETS = r"""
target_without_service: write module:Service
    graphs.disagg
target_is_a_path: write module:Service
    graphs/disagg.py:Frontend
module_missing: no module 'graphs.disag'.*did you mean 'graphs.disagg:Frontend'\? graphs here: graphs.disagg:Frontend
    graphs.disag:Frontend
folder_missing: no module 'grafs'.*did you mean 'graphs.disagg:Frontend'\?
    grafs.disagg:Frontend
attribute_missing: has no 'Fronted'.*did you mean 'Frontend'\?
    graphs.disagg:Fronted
"""
ONE_FILE = r"""
not_a_service: is not a service but a plain class
    class Frontend:\n    pass\n
not_a_class: is not a service but a int
    Frontend = 3\n
import_of_missing_package: disagg\.py:4: importing .* No module named 'no_such_pkg'
    import no_such_pkg\n
import_raises: disagg\.py:4: importing .* ZeroDivisionError
    1 / 0\n
import_exits: disagg\.py:4: importing .* SystemExit: 7
    raise SystemExit(7)\n
syntax_error: disagg\.py:4: importing .* SyntaxError
    class Frontend(:\n
numbered_name: 'Worker_1' ends in '_<number>'
    @service\nclass Worker_1:\n    pass\n
illegal_name: 'Front\.end' is not a service name
    @service(name='Front.end')\nclass Frontend:\n    pass\n
name_of_embedded_server: 'Etcd' is taken by the embedded server
    @service\nclass Etcd:\n    pass\n
name_of_a_section: 'Common' is a section
    @service\nclass Common:\n    pass\n
illegal_namespace: namespace 'a\.b'
    @service(dynamo={"namespace": "a.b"})\nclass Frontend:\n    pass\n
unknown_role: role 'decoder' is unknown.*'decode'
    @service(dynamo={"role": "decoder"})\nclass A:\n    pass\n
unknown_dynamo_key: 'namspace'.*did you mean 'namespace'
    @service(dynamo={"namspace": "a"})\nclass A:\n    pass\n
not_enabled: 'enabled': False.*cannot run
    @service(dynamo={"enabled": False})\nclass A:\n    pass\n
unknown_resource: resources\.gpus is unknown.*'gpu'
    @service(resources={"gpus": 1})\nclass A:\n    pass\n
fraction_of_a_gpu: whole number of devices per worker
    @service(resources={"gpu": 0.5})\nclass A:\n    pass\n
bad_memory: resources\.memory .*20Gi
    @service(resources={"memory": "much"})\nclass A:\n    pass\n
no_workers: workers must be .* at least 1, not 0
    @service(workers=0)\nclass A:\n    pass\n
unknown_service_option: @service\(worker=…\) is unknown.*'workers'
    @service(worker=2)\nclass A:\n    pass\n
config_is_no_model: config must be a pydantic model class
    @service(config=dict)\nclass A:\n    pass\n
envs_with_a_bool: envs\.DEBUG must be a string
    @service(envs={'DEBUG': True})\nclass A:\n    pass\n
endpoint_not_async: must be `async def`
    class A:\n    @endpoint()\n    def f(self, r):\n        return r\n
endpoint_name: 'a\.b' is not an endpoint name
    class A:\n    @endpoint(name='a.b')\n    async def f(self, r):\n        return r\n
depends_on_plain_class: not a service; decorate
    class B:\n    pass\n\n\nclass A:\n    b = depends(B)\n
link_to_plain_class: Frontend\.link\(.*not a service
    @service\nclass Frontend:\n    pass\n\n\nFrontend.link(dict)\n
link_to_itself: cannot be linked to itself
    @service\nclass Frontend:\n    pass\n\n\nFrontend.link(Frontend)\n
"""
GRAPHS = (
    *(BadInput(name, expect, args=(target,)) for name, expect, target in _rows(TARGETS)),
    *(BadInput(name, expect, {"graphs/disagg.py": HEADER + body}) for name, expect, body in _rows(ONE_FILE)),
    BadInput(
        "two_of_one_name",
        r"disagg\.py:9: two services are named 'Worker'; the other is at .*disagg\.py:4",
        {
            "graphs/disagg.py": HEADER
            + '@service\nclass Worker:\n    pass\n\n\n@service(name="Worker")\nclass Other:\n    pass\n\n\n'
            "@service\nclass Frontend:\n    a = depends(Worker)\n    b = depends(Other)\n"
        },
    ),
    BadInput(
        "names_differ_in_case",
        r"'Worker' .* and 'WORKER' differ only in case",
        {
            "graphs/disagg.py": HEADER
            + "@service\nclass Worker:\n    pass\n\n\n@service\nclass WORKER:\n    pass\n\n\n"
            "@service\nclass Frontend:\n    a = depends(Worker)\n    b = depends(WORKER)\n"
        },
    ),
    BadInput(
        "different_namespaces",
        r"Worker is in namespace 'b', but Frontend .* in 'a'",
        {
            "graphs/disagg.py": HEADER + '@service(dynamo={"namespace": "b"})\nclass Worker:\n    pass\n\n\n'
            '@service(dynamo={"namespace": "a"})\nclass Frontend:\n    w = depends(Worker)\n'
        },
    ),
    BadInput(
        "two_endpoints_of_one_name",
        r"two endpoints are named 'g': f and h",
        {
            "graphs/disagg.py": HEADER
            + "@service\nclass A:\n    @endpoint(name='g')\n    async def f(self, r):\n        return r\n\n"
            "    @endpoint(name='g')\n    async def h(self, r):\n        return r\n"
        },
    ),
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
)

YAML = r"""
not_yaml: c\.yaml: line 3, column 1: not YAML
    Frontend:\n  port: [8000\n
list_at_top: c\.yaml: must be one section per service, not a list
    - Frontend\n
section_is_a_number: section 'Frontend' must hold keys and values, not 8000
    Frontend: 8000\n
duplicate_key: line 3: the key 'port' was given before, on line 2
    Frontend:\n  port: 1\n  port: 2\n
duplicate_section: line 3: the key 'Frontend' was given before
    Frontend:\n  port: 1\nFrontend: {}\n
both_spellings: 'max-num-seqs' and 'max_num_seqs' are one key
    VllmWorker:\n  max-num-seqs: 1\n  max_num_seqs: 2\n
key_is_a_number: line 2: the key 8000 is not a string
    Frontend:\n  8000: port\n
python_tag: line 1, column \d+: not YAML: could not determine a constructor
    Frontend: !!python/name:os.system x\n
alias_of_itself: line 2: an alias of something that holds it
    Frontend: &a\n  b: *a\n
infinite_number: Frontend\.limit: inf is not a number
    Frontend:\n  limit: .inf\n
unknown_section: 'VllmWorkr' is no service.*did you mean 'VllmWorker'
    VllmWorkr: {}\n
section_in_lower_case: 'frontend' is no service.*did you mean 'Frontend'
    frontend:\n  port: 1\n
unknown_key: VllmWorker: unknown key 'max.num.seq'; did you mean 'max-num-seqs'
    VllmWorker:\n  max-num-seq: 4\n
wrong_type: VllmWorker: max.num.seqs: must be a valid integer.*given 'ten' \(str\)
    VllmWorker:\n  max-num-seqs: ten\n
bool_is_no_number: VllmWorker: max.num.seqs must be a whole number, given True
    VllmWorker:\n  max-num-seqs: yes\n
number_is_no_string: VllmWorker: model: must be a valid string \(put it in quotes.*given 7
    VllmWorker:\n  model: 7\n
unknown_service_arg: VllmWorker\.ServiceArgs: unknown key 'worker'; .*did you mean 'workers'
    VllmWorker:\n  ServiceArgs:\n    worker: 2\n
service_args_misspelt: unknown key 'service-args'; did you mean 'ServiceArgs'
    VllmWorker:\n  service-args: {workers: 2}\n
service_args_is_a_number: ServiceArgs must hold workers
    VllmWorker:\n  ServiceArgs: 2\n
workers_is_true: workers must be a whole number of at least 1, not True
    VllmWorker:\n  ServiceArgs: {workers: true}\n
workers_is_zero: workers must be .* at least 1, not 0; .* do not link it
    VllmWorker:\n  ServiceArgs: {workers: 0}\n
negative_gpu: resources\.gpu must be a whole number of devices per worker, not -1
    VllmWorker:\n  ServiceArgs: {resources: {gpu: -1}}\n
unknown_resource_key: resources\.gpus is unknown
    VllmWorker:\n  ServiceArgs: {resources: {gpus: 1}}\n
no_frontend: Frontend\.ServiceArgs: workers must be .* at least 1, not 0
    Frontend:\n  ServiceArgs: {workers: 0}\n
negative_deadline: drain_deadline_s: must be greater than 0
    VllmWorker:\n  ServiceArgs: {drain-deadline: -1}\n
env_is_a_fraction: envs\.RATIO must be a string
    VllmWorker:\n  ServiceArgs: {envs: {RATIO: 1.10}}\n
env_of_ours: envs\.DYN_NAMESPACE is set by dynamo serve itself
    VllmWorker:\n  ServiceArgs: {envs: {DYN_NAMESPACE: x}}\n
env_name: 'NOT-A-NAME' is not a name of an environment variable
    VllmWorker:\n  ServiceArgs: {envs: {NOT-A-NAME: x}}\n
common_key_missing: lists 'modell', which Common does not have.*did you mean 'model'
    Common: {model: x}\nVllmWorker:\n  common-configs: [modell]\n
common_configs_is_text: common-configs must be a list
    Common: {model: x}\nVllmWorker:\n  common-configs: model\n
common_with_service_args: Common is no service
    Common:\n  ServiceArgs: {workers: 2}\n
unknown_host_key: Host: unknown key 'gpu'.*did you mean 'gpus'
    Host:\n  gpu: sim:8\n
host_gpus: Host: gpus: must be sim:N
    Host:\n  gpus: {sim: 8}\n
host_address: Host: etcd_endpoints: must be addresses
    Host:\n  etcd_endpoints: localhost\n
planner_key: Planner: unknown key 'adjustment.intervall'.*'adjustment-interval'
    Planner:\n  adjustment-intervall: 3\n
planner_thresholds: decode.kv.scale.down.threshold \(0\.95\) must be below
    Planner:\n  decode-kv-scale-down-threshold: 0.95\n
planner_engine_size: decode_engine_num_gpu is 2, but VllmWorker asks for 1
    Planner:\n  decode-engine-num-gpu: 2\n
planner_budget: max_gpu_budget is 1, but one worker of each role needs 2
    Planner:\n  max-gpu-budget: 1\n
planner_model: served_model_name is 'b', but Frontend serves 'a'
    Frontend: {served_model_name: a}\nPlanner: {served_model_name: b}\n
"""
WORDS = r"""
stray_word: unexpected word 'stray'
    stray
stray_word_after_a_value: unexpected word 'stray'
    --VllmWorker.model x stray
override_without_service: unknown option '--workers=2'
    --workers=2
override_with_empty_part: '--VllmWorker\.\.workers=2' has an empty part
    --VllmWorker..workers=2
override_of_unknown_service: command line: the section 'Vllm' is no service
    --Vllm.model=x
override_contradicts: contradicts an earlier --VllmWorker\.model
    --VllmWorker.model=x --VllmWorker.model.y=1
env_without_value: has no value
    --VllmWorker.ServiceArgs.envs.FOO
single_dash: unexpected word '-x' after '--VllmWorker\.model'
    --VllmWorker.model -x
namespace_option: namespace 'a/b' is not usable
    --namespace a/b
"""
FILE = ("-f", "c.yaml")
CONFIGS = (
    BadInput(
        "file_missing",
        r"no configuration file .*disag\.yaml; did you mean 'disagg\.yaml'",
        {"disagg.yaml": ""},
        (TARGET, "-f", "disag.yaml"),
    ),
    BadInput(
        "unknown_key_by_override",
        r"command line: VllmWorker: unknown key 'max.seqs'",
        {"c.yaml": "VllmWorker: {model: x}\n"},
        (TARGET, *FILE, "--VllmWorker.max-seqs=1"),
    ),
    BadInput("deployment_config", r"DYN_DEPLOYMENT_CONFIG: line 1.*not YAML", env={"DYN_DEPLOYMENT_CONFIG": "{"}),
    *(BadInput(name, expect, {"c.yaml": text}, (TARGET, *FILE)) for name, expect, text in _rows(YAML)),
    *(BadInput(name, expect, args=(TARGET, *words.split())) for name, expect, words in _rows(WORDS)),
)

BAD_INPUTS = GRAPHS + CONFIGS
