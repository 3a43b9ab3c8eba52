"""`dynamo export kubernetes` and `dynamo import kubernetes` on the command line: files, streams, exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml

from dynamo_local.errors import EXIT_BAD_INPUT, EXIT_OK
from tests.fakes.arbiter.scripted_arbiter import dynamo

EXAMPLES = Path(__file__).parents[3] / "examples" / "dynamo_1x"
IMAGE = ("--image", "image:1")


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("agg", "vllm_disagg"):
        (tmp_path / f"{name}.yaml").write_text((EXAMPLES / f"{name}.yaml").read_text())


def export(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    return dynamo(monkeypatch, "export", "kubernetes", *words)


def test_stdout_is_the_manifest_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(monkeypatch, "-f", "vllm_disagg.yaml", *IMAGE, "-n", "my_graph") == EXIT_OK
    out, err = capsys.readouterr()
    graph = yaml.safe_load(out)
    assert (graph["kind"], graph["metadata"]["name"]) == ("DynamoGraphDeployment", "my-graph")
    assert "left out" in err
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in err


def test_overrides_are_as_for_serve_and_files_go_to_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("-f", "vllm_disagg.yaml", *IMAGE, "-o", "out/more", "--api-version", "v1alpha1", "--name", "g")
    assert export(monkeypatch, *words, "--Decode.ServiceArgs.workers=3") == EXIT_OK
    assert capsys.readouterr().out == "out/more/g.yaml\n"
    graph = yaml.safe_load(Path("out/more/g.yaml").read_text())
    assert graph["spec"]["services"]["Decode"]["replicas"] == 3


def test_json_has_the_document_and_every_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "--Decode.ServiceArgs.envs.HF_TOKEN=geheim"
    assert export(monkeypatch, "-f", "vllm_disagg.yaml", *IMAGE, "--json", more) == EXIT_OK
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["document"]["metadata"]["name"] == "dynamo"
    assert (found["secret"], found["secret_keys"]) == ("dynamo-secrets", ["HF_TOKEN"])
    assert {note["kind"] for note in found["notes"]} == {"left out", "changed", "secret"}
    assert "geheim" not in out + err


def test_how_to_make_the_secret_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("-f", "vllm_disagg.yaml", *IMAGE, "--secret", "mine", "--Decode.ServiceArgs.envs.HF_TOKEN=geheim")
    assert export(monkeypatch, *words) == EXIT_OK
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith('kubectl create secret generic mine --from-literal=HF_TOKEN="$HF_TOKEN"')


def test_a_planner_needs_an_image_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dynamo's image has no dynamo-local in it; to leave the planner out must be said."""
    words = ("-f", "vllm_disagg.yaml", *IMAGE, "--planner")
    assert export(monkeypatch, *words) == EXIT_BAD_INPUT
    assert "--planner-image IMAGE" in capsys.readouterr().err
    assert export(monkeypatch, *words, "--planner-image", "planner:1") == EXIT_OK
    account, role, binding, graph = yaml.safe_load_all(capsys.readouterr().out)
    assert [one["kind"] for one in (account, role, binding)] == ["ServiceAccount", "Role", "RoleBinding"]
    assert "Planner" in [one["name"] for one in graph["spec"]["components"]]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("-f", "agg.yaml"), "Missing option '--image'"),
        (("-f", "away.yaml", *IMAGE), "no configuration file away.yaml"),
        ((*IMAGE,), "there is no graph to serve"),
        (("-f", "agg.yaml", *IMAGE, "--name", "No_Name"), "must begin with a small letter"),
        (("-f", "agg.yaml", *IMAGE, "--Mocker.rôle=x"), "rôle"),
        (("-f", "agg.yaml", *IMAGE, "-o", "agg.yaml/x"), "cannot write agg.yaml/x"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str
) -> None:
    assert export(monkeypatch, *words) == EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert why in err


def test_what_was_exported_is_imported_to_a_file_that_serve_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(monkeypatch, "-f", "agg.yaml", *IMAGE) == EXIT_OK
    manifest = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(manifest.encode())))
    assert dynamo(monkeypatch, "import", "kubernetes", "-", "-o", "back.yaml") == EXIT_OK
    assert capsys.readouterr().out == "back.yaml\n"
    plans = []
    for file in ("agg.yaml", "back.yaml"):
        assert dynamo(monkeypatch, "serve", "-f", file, "--gpus", "sim:1", "--dry-run", "--json") == EXIT_OK
        plan = json.loads(capsys.readouterr().out)
        plans.append([(one["watcher_name"], one["role"], one["gpus"]) for one in plan["watchers"]])
    assert plans[0] == plans[1]


def test_import_as_json_has_sections_and_notes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    export(monkeypatch, "-f", "agg.yaml", *IMAGE, "-o", ".")
    capsys.readouterr()
    assert dynamo(monkeypatch, "import", "kubernetes", "dynamo.yaml", "--json") == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], set(found["sections"])) == ("dynamo", {"Frontend", "Mocker"})
    assert {"kind": "changed", "where": "image"}.items() <= found["notes"][0].items()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [", "not YAML"),
        ("kind: Pod", "there is no DynamoGraphDeployment"),
        ("\udcff", "not UTF-8"),
        (None, "No such"),
    ],
)
def test_what_is_no_manifest_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str | None, why: str
) -> None:
    if text is not None:
        Path("m.yaml").write_text(text, encoding="utf-8", errors="surrogateescape")
    assert dynamo(monkeypatch, "import", "kubernetes", "m.yaml") == EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert why in err
