"""Generated parts of the pages are current, and what is written by hand beside them is complete."""

from __future__ import annotations

import re

import pytest

from dynamo_local import errors
from dynamo_local.config.schema import HostConfig, ServiceArgs
from dynamo_local.core.types import WorkerState
from tests.tools.pages import ROOT, generator, shown

GENERATE = generator()
IN_PAGES = [(page, name) for page in GENERATE.pages() for name in GENERATE.parts_of(page)]


@pytest.mark.parametrize(
    ("page", "name"), IN_PAGES, ids=lambda value: value if isinstance(value, str) else shown(value)
)
def test_generated_part_is_current(page, name):
    """A table says what the code says; `python docs/generate.py` writes it anew."""
    assert GENERATE.parts_of(page)[name] == GENERATE.render(name)


def test_every_generated_part_is_in_a_page():
    """Nothing is generated for nobody, and no marker is misspelt."""
    assert {name for _, name in IN_PAGES} == set(GENERATE.PARTS)


def test_every_marker_has_its_end():
    """A marker without an end would never be written anew."""
    for page in GENERATE.pages():
        text = page.read_text(encoding="utf-8")
        begins = re.findall(r"<!-- generated: ([a-z-]+) -->", text)
        assert begins == re.findall(r"<!-- end of ([a-z-]+) -->", text), shown(page)


def test_a_stale_part_is_noticed(tmp_path, monkeypatch, capsys):
    """`--check` names the page, changes nothing and exits with 1; without it the part is written."""
    (tmp_path / "docs").mkdir()
    page = tmp_path / "README.md"
    page.write_text("<!-- generated: commands -->\nold\n<!-- end of commands -->\n")
    monkeypatch.setattr(GENERATE, "ROOT", tmp_path)
    monkeypatch.setattr(GENERATE, "schemas", dict)
    monkeypatch.setattr("sys.argv", ["generate.py", "--check"])
    assert (GENERATE.main(), capsys.readouterr().out) == (1, "not current: README.md\n")
    assert "old" in page.read_text()
    monkeypatch.setattr("sys.argv", ["generate.py"])
    assert (GENERATE.main(), capsys.readouterr().out) == (0, "written: README.md\n")
    assert page.read_text() == GENERATE.render("commands") + "\n"


def _rows(page: str, line: str) -> set[str]:
    """First cells of the first table at or below a line, such as a heading or the table's head, without backticks."""
    _, found, text = (ROOT / page).read_text(encoding="utf-8").partition(f"\n{line}\n")
    assert found, f"{page} has no line {line!r}"
    text = f"{line}\n{text}"
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None, line
    return {line.split("|")[1].strip().strip("`") for line in table[0].splitlines()[2:]}


@pytest.mark.parametrize(("heading", "model"), [("## `Host`", HostConfig), ("## `ServiceArgs`", ServiceArgs)])
def test_every_key_of_a_known_section_is_explained(heading, model):
    """The tables that are written by hand name each key, and no other."""
    assert _rows("docs/configuration.md", heading) == {name.replace("_", "-") for name in model.model_fields}


def test_every_state_is_explained():
    """Whoever sees a state in `dynamo status` finds it in the operations page."""
    assert _rows("docs/operations.md", "## First look") == {str(state) for state in WorkerState}


def test_every_exit_code_is_explained():
    """The README's table has each code that `errors` gives."""
    codes = {str(value) for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert codes <= _rows("README.md", "| Exit code | Meaning |")


def test_every_dependency_has_its_reason():
    """The page explains each package that setup.cfg installs, and no other."""
    from configparser import ConfigParser

    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    explained_extras = ("embedded", "kubernetes", "otel", "plugins", "predictors", "report", "tensorboard", "vllm")
    explaining = (extras[name] for name in explained_extras)
    wanted = config["options"]["install_requires"] + "".join(explaining)
    names = {re.split(r"[<>=;\[ ]", line)[0] for line in wanted.split("\n") if line and not line.startswith("#")}
    explained = {
        name
        for cell in _rows("docs/dependencies.md", "| Package | Why this one |")
        for name in cell.split(" (")[0].split(", ")
    }
    assert explained == names


def test_schemas_are_current_and_no_other_is_there():
    wanted = GENERATE.schemas()
    assert {file: file.read_text(encoding="utf-8") for file in (ROOT / "docs" / "schemas").iterdir()} == wanted


def test_a_key_does_not_go_without_another_version():
    """Readers of an answer go by its version."""
    old = next(text for file, text in GENERATE.schemas().items() if file.name == "status.schema.json")
    less = old.replace('"restarts": {', '"begun_again": {').replace('"restarts",', '"begun_again",')
    assert GENERATE.broken(old, less) == ["$.workers[].restarts (is gone)"]
    assert GENERATE.broken(less, old) == ["$.workers[].begun_again (is gone)"]
    assert GENERATE.broken(old, less.replace("dynamo.status.v1", "dynamo.status.v2")) == []
