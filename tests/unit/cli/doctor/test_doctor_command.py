"""`dynamo doctor` as a shell calls it: table, JSON, list, exit codes, archive."""

from __future__ import annotations

import json
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.cli.doctor import bundle, command
from dynamo_local.core.doctor import CHECKS
from dynamo_local.core.doctor.findings import Finding, Verdict, id_of
from dynamo_local.core.doctor.software import Packages
from dynamo_local.core.types import Missing
from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK
from dynamo_local.system.paths import Paths
from tests.fakes.arbiter.scripted_arbiter import dynamo

IDS = (
    "cuda clock command compiler descriptors disk dynamo-1x etcd folder gpu-compute-mode gpu-driver gpu-ecc gpu-fabric "
    "gpu-lock gpu-lost gpu-mig gpu-nodes gpu-numa gpu-nvlink gpu-pcie gpu-stranger gpu-throttled gpu-topology "
    "gpu-visible lease-ttl locked-memory loopback memory model-chat-template model-config model-folder model-tokenizer "
    "model-weights namespace-dead namespace-kept namespace-silent nats network-folder nixl nvml-package orphans "
    "packages packages-clash port port-range processes processors proxy python rdma-access runtime-leftovers "
    "shadowed-modules shm shm-orphans socket-path statefile ucx-devices ucx-transports vllm vllm-build"
)
SECRET = "a-key-that-nobody-may-see"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shell of a user of whom nothing is on this host, in an empty folder."""
    named = {"XDG_RUNTIME_DIR": "run", "HOME": "home", "DYN_LOCAL_STATE_DIR": "state", "DYN_LOCAL_LOG_DIR": "logs"}
    for name, folder in {**named, "here": "here"}.items():
        (tmp_path / folder).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / folder))
    for name in ("CUDA_VISIBLE_DEVICES", "ETCD_ENDPOINTS", "NATS_SERVER", "DYN_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_the_ids_are_those_that_were_released() -> None:
    """People ask for findings by id: a name that changes breaks their scripts."""
    assert {id_of(check) for check in CHECKS} == set(IDS.split())


def test_exit_code_and_counts_are_those_of_the_findings(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    code = dynamo(monkeypatch, "doctor", "--json")
    report = json.loads(capsys.readouterr().out)
    assert code == (EXIT_FAILED if report["serving_fails"] else EXIT_OK)
    assert sum(report["counts"].values()) == len(report["findings"])


def test_the_list_explains_every_id(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert dynamo(monkeypatch, "doctor", "--list", "--json") == EXIT_OK
    listed = json.loads(capsys.readouterr().out)
    assert {each["id"] for each in listed["checks"]} == set(IDS.split())
    assert dynamo(monkeypatch, "doctor", "--list") == EXIT_OK
    assert "gpu-mig" in capsys.readouterr().out


def test_a_problem_is_exit_code_1_and_says_its_repair(host: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert dynamo(monkeypatch, "doctor", "--model", str(host / "nope")) == EXIT_FAILED
    out = capsys.readouterr().out
    assert "model-folder" in out
    assert "-> hf download" in out
    assert "Serving would fail." in out


def test_the_same_reason_is_said_once() -> None:
    findings = [Finding(id_, Verdict.NOT_CHECKED, "", "no GPU", "") for id_ in ("gpu-mig", "gpu-ecc", "gpu-ecc")]
    first, last = command.lines(findings, show_all=True)
    assert first.endswith("(no GPU): gpu-mig, gpu-ecc")
    assert last.startswith("0 problems, 0 warnings, 0 ok, 3 not checked.")


def test_what_is_in_order_is_shown_on_demand() -> None:
    findings = [Finding("shm", Verdict.OK, "", "/dev/shm: 8 GiB", "")]
    assert len(list(command.lines(findings, show_all=False))) == 1
    assert "/dev/shm: 8 GiB" in "".join(command.lines(findings, show_all=True))


# --- the archive ---------------------------------------------------------------------------------


@pytest.fixture
def run(host: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A run whose every file holds the secret."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    paths = Paths.of("a", os.environ)
    paths.prepare()
    paths.statefile.write_text(json.dumps({"run_id": "x", "config": {"Frontend": {"api-key": SECRET}}}))
    paths.log_file("a_VllmWorker").write_text(f"HF_TOKEN is {SECRET}\nAuthorization: Bearer sk-{'1' * 20}\nready\n")
    (paths.logs / "events.jsonl").write_text(json.dumps({"envs": {"MY_PASSWORD": SECRET}}) + "\n")
    (paths.logs / "ticks.jsonl").write_text("{}\n")
    return paths


def test_the_archive_has_no_secret(run: Paths, host: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    dynamo(monkeypatch, "doctor", "--bundle", str(host / "b.tar.gz"))
    err = capsys.readouterr().err
    with tarfile.open(host / "b.tar.gz") as archive:
        files = {each.name: archive.extractfile(each) for each in archive}
        texts = {name: file.read().decode() for name, file in files.items() if file is not None}
    names = (
        "doctor.json",
        "versions.txt",
        "environment.txt",
        "a/state.json",
        "a/logs/a_VllmWorker.log",
        "a/events.jsonl",
    )
    assert texts.keys() == {f"dynamo-doctor/{name}" for name in names}
    assert all(SECRET not in text and "sk-1" not in text for text in texts.values())
    assert texts["dynamo-doctor/a/logs/a_VllmWorker.log"].endswith("ready\n")
    assert all(f"{name}: " in err for name in names)
    assert stat.S_IMODE((host / "b.tar.gz").stat().st_mode) == 0o600


def test_a_file_that_is_there_is_not_replaced(host: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (host / "b.tar.gz").write_text("mine")
    assert dynamo(monkeypatch, "doctor", "--bundle", str(host / "b.tar.gz")) == EXIT_BAD_INPUT
    assert "is there already" in capsys.readouterr().err
    assert (host / "b.tar.gz").read_text() == "mine"


def test_a_list_with_a_bundle_is_refused(host: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert dynamo(monkeypatch, "doctor", "--list", "--bundle", str(host / "b.tar.gz")) == EXIT_BAD_INPUT
    assert "say one of the two" in capsys.readouterr().err
    assert not (host / "b.tar.gz").exists()


def test_a_folder_that_is_not_there_is_one_line(host: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert dynamo(monkeypatch, "doctor", "--bundle", str(host / "nope" / "b.tar.gz")) == EXIT_BAD_INPUT
    told = capsys.readouterr().err.splitlines()[-1]
    assert "cannot be written: No such file or directory; name another file" in told


def test_an_archive_of_a_namespace_that_never_was_is_refused(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert dynamo(monkeypatch, "doctor", "--bundle", str(host / "b.tar.gz"), "-n", "nope") == EXIT_BAD_INPUT
    assert "no log is of namespace 'nope'" in capsys.readouterr().err.splitlines()[-1]
    assert not (host / "b.tar.gz").exists()


def test_the_archive_is_made_without_packages_or_a_readable_statefile(run: Paths) -> None:
    run.statefile.write_text("{")
    members = bundle.contents({}, Missing("it hangs"), [run], os.environ)
    assert [each.name for each in members if each.name.endswith("state.json")] == []
    assert bundle.contents({}, Packages({"click": "8.1"}), [], {})[1].text == "click==8.1\n"
