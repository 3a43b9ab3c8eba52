"""The statefile's schema: what is written, what is refused and by which name, what older files become."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.core.types import Role, WorkerState
from dynamo_local.errors import StateError
from dynamo_local.state.raw import StateMissing, read_raw, statefile_path
from dynamo_local.state.run_id import began_at, new_run_id
from dynamo_local.state.schema import ComponentEntry, EntryResources, State
from dynamo_local.state.store import NOBODY, load

GOLDEN = Path(__file__).parents[2] / "golden" / "statefile"
SECRET_CONFIG = '{"W": {"ServiceArgs": {"envs": {"HF_TOKEN": "hush"}}}}'
V1 = GOLDEN / "v1-disagg.json"


def v1() -> Any:
    return json.loads(V1.read_text())


def written(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "dynamo.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("*.json")), ids=lambda path: path.name)
def test_golden_files_load_for_ever(path: Path) -> None:
    state = load(path)
    assert state.schema_version == 1
    assert "dynamo_VllmWorker" in state.components


def test_schema_one_is_read_as_it_was_meant() -> None:
    state = load(V1)
    entry = state.components["dynamo_VllmWorker"]
    assert (entry.state, entry.role, entry.pid, entry.lease) == (
        WorkerState.READY,
        Role.DECODE,
        4711,
        "694d967da694ea1a",
    )
    assert (entry.resources.allocated_gpus, entry.resources.gpu_uuids) == (
        ["0"],
        ["GPU-sim00000-0000-0000-0000-000000000000"],
    )
    assert state.environment.SYSTEM_RESOURCES.total_gpus == 8


def test_an_unchanged_file_is_written_back_byte_for_byte() -> None:
    raw = v1()
    raw["from_the_future"] = {"a": [1, None]}
    raw["components"]["dynamo_VllmWorker"]["colour"] = None
    raw["components"]["dynamo_VllmWorker"]["resources"]["mig"] = "no"
    state = State.model_validate_json(json.dumps(raw))
    assert json.loads(state.model_dump_json()) == raw


def test_a_template_has_empty_resources_no_lease_and_no_pid() -> None:
    entry = json.loads(
        ComponentEntry(watcher_name="dynamo_W", component="W", state=WorkerState.EXITED).model_dump_json()
    )
    assert entry["resources"] == {}
    assert not {"lease", "pid", "pid_start_time"} & entry.keys()


def test_a_predecessors_file_is_understood() -> None:
    path = GOLDEN / "v0-predecessor" / "dynamo.json"
    assert "hf_secret_value" in path.read_text()
    state = load(path)
    entry = state.components["dynamo_VllmWorker_1"]
    assert (entry.component, entry.resources.allocated_gpus, entry.lease) == ("VllmWorker", ["1"], "694d967da694ea1b")
    assert state.run_id == NOBODY
    assert "hf_secret_value" not in state.model_dump_json()


def edit(*path: str, value: Any) -> Callable[[Any], None]:
    """Set one value deep in the file."""

    def change(raw: Any) -> None:
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = value

    return change


WORKER = ("components", "dynamo_VllmWorker")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("schema_version", value=2), "schema_version: 2 is newer than 1"),
        (edit("schema_version", value="1"), "schema_version: '1' is no version number"),
        (edit("schema_version", value=True), "schema_version: True is no version number"),
        (edit("namespace", value="a.b"), "namespace: String should match pattern"),
        (edit("namespace", value="other"), "component is .*; its worker is called other_"),
        (edit("run_id", value=None), "run_id: Input should be a valid string"),
        (edit("components", value=[]), "components: Input should be"),
        (
            edit(*WORKER, "watcher_name", value="dynamo_Other"),
            "watcher_name is 'dynamo_Other', not 'dynamo_VllmWorker'",
        ),
        (edit(*WORKER, "component", value="Other"), "components.dynamo_VllmWorker.component is 'Other'"),
        (edit(*WORKER, "state", value="happy"), "components.dynamo_VllmWorker.state: Input should be 'pending'"),
        (edit(*WORKER, "role", value="boss"), "components.dynamo_VllmWorker.role: Input should be 'frontend'"),
        (edit(*WORKER, "pid", value="4711"), "components.dynamo_VllmWorker.pid: Input should be a valid integer"),
        (edit(*WORKER, "pid", value=0), "components.dynamo_VllmWorker.pid: Input should be greater than 0"),
        (edit(*WORKER, "pid_start_time", value=float("nan")), "pid_start_time: Input should be a finite number"),
        (edit(*WORKER, "lease", value="0xAB"), "components.dynamo_VllmWorker.lease: String should match pattern"),
        (edit(*WORKER, "lease", value="1234"), "endpoint .* is not under lease 1234"),
        (edit(*WORKER, "restarts", value=-1), "restarts: Input should be greater than or equal to 0"),
        (edit(*WORKER, "resources", "gpu_uuids", value=["GPU-x", "GPU-y"]), "1 allocated_gpus but 2 gpu_uuids"),
        (edit(*WORKER, "resources", "allocated_gpus", value=["1", "1"]), "allocated_gpus names a GPU twice: 1, 1"),
        (
            edit(*WORKER, "resources", value={"allocated_gpus": ["1"]}),
            "components.dynamo_PrefillWorker.resources: GPU index 1 is held by dynamo_VllmWorker already",
        ),
        (
            edit(*WORKER, "resources", value={"gpu_uuids": ["GPU-sim00000-0000-0000-0000-000000000001"]}),
            "GPU-sim00000-0000-0000-0000-000000000001 is held by dynamo_VllmWorker already",
        ),
        (
            edit("components", "dynamo_a.b", value={"watcher_name": "dynamo_a.b", "component": "a.b"}),
            "components.dynamo_a",
        ),
        (edit("nats_server", value="nats://user:hush@127.0.0.1:4222"), "nats_server: holds credentials"),
        (edit("etcd_endpoints", value="127.0.0.1:1,root:hush@127.0.0.1:2"), "etcd_endpoints: holds credentials"),
        (edit("environment", "HF_TOKEN", value="hush"), "environment.HF_TOKEN: Extra inputs are not permitted"),
        (
            edit("environment", "DYNAMO_SERVICE_CONFIG", value=SECRET_CONFIG),
            "DYNAMO_SERVICE_CONFIG: holds a secret in the clear",
        ),
        (edit("environment", "DYNAMO_SERVICE_CONFIG", value="{"), "DYNAMO_SERVICE_CONFIG: not JSON"),
    ],
)
def test_a_broken_file_is_refused_naming_file_and_field(
    tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    """One line with the path and the field; the value is not repeated where it may be a secret."""
    raw = v1()
    change(raw)
    path = written(tmp_path, raw)
    with pytest.raises(StateError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON: Expecting value"),
        ("[]", "holds a list, not a JSON object"),
        ("[" * 200_000, "its brackets are nested too deep"),
        ("{}", "components: missing, so this is no statefile"),
        (V1.read_text()[:-40], "is not valid JSON: .*line "),
    ],
)
def test_what_is_no_statefile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(StateError, match=message):
        load(written(tmp_path, text))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "dynamo.json"
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(StateError, match=r"is not UTF-8 \(byte 7\)"):
        load(path)


def test_a_missing_file_is_told_apart_from_a_broken_one(tmp_path: Path) -> None:
    for reader in (load, read_raw):
        with pytest.raises(StateMissing, match="nothing runs in namespace 'dynamo'"):
            reader(tmp_path / "dynamo.json")


def test_a_quick_reader_sees_the_same_values() -> None:
    assert read_raw(V1) == v1()


@pytest.mark.parametrize(
    "config",
    [
        {"Common": {"hf_token": "****", "tokenizer": "tiny", "max_tokens": 5, "nats": "nats://****@127.0.0.1"}},
        {"W": {"ServiceArgs": {"envs": {"HF_TOKEN": "****", "THREADS": 4, "A": "b"}}}},
    ],
)
def test_a_masked_service_configuration_is_accepted(tmp_path: Path, config: Any) -> None:
    raw = v1()
    raw["environment"]["DYNAMO_SERVICE_CONFIG"] = json.dumps(config)
    assert json.loads(load(written(tmp_path, raw)).environment.DYNAMO_SERVICE_CONFIG) == config


def test_where_the_statefile_lives() -> None:
    """`$DYN_LOCAL_STATE_DIR`, else under the home; a namespace cannot lead elsewhere."""
    assert statefile_path("ns", {"DYN_LOCAL_STATE_DIR": "/x", "HOME": "/h"}) == Path("/x/ns.json")
    assert statefile_path("ns", {"HOME": "/h"}) == Path("/h/.dynamo/state/ns.json")
    with pytest.raises(StateError, match="begin with a letter"):
        statefile_path("../ns", {})


def test_run_ids_sort_by_time_and_differ() -> None:
    early, late = new_run_id(1_700_000_000_000), new_run_id(1_700_000_000_001)
    assert early < late < new_run_id()
    assert len(early) == 26
    assert new_run_id(0).startswith("0" * 10)
    assert new_run_id(2**48 - 1).startswith("7ZZZZZZZZZ")
    assert new_run_id(5) != new_run_id(5)
    assert not set(early) & set("ILOU")
    assert began_at(late) == 1_700_000_000.001
    assert [began_at(other) for other in ("", "None", early[1:], "U" * 26)] == [None] * 4


def test_entries_do_not_share_their_defaults() -> None:
    one, two = (ComponentEntry(watcher_name=f"dynamo_{name}", component=name) for name in "AB")
    one.endpoints.append("x")
    one.resources = EntryResources(gpu_uuids=["GPU-1"])
    assert two.endpoints == []
    assert two.resources.gpu_uuids is None
