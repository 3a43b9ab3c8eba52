"""`module:Service` to a graph: what runs, in which order, and that graphs of one process do not mix."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.errors import GraphError
from dynamo_local.sdk.loader import FILE_BYTES_MAX, FILES_MAX, graphs_below, load_graph
from tests.tools.clean_imports import clean_imports

COMPONENTS = """\
from dynamo_local.sdk import depends, service


@service
class PrefillWorker:
    pass


@service
class VllmWorker:
    prefill = depends(PrefillWorker, optional=True)


@service(dynamo={"namespace": "inference"})
class Processor:
    worker = depends(VllmWorker)


@service
class Frontend:
    processor = depends(Processor)
"""
IMPORTS = "from components import *\n"
AGG = IMPORTS + "Frontend.link(Processor).link(VllmWorker)\n"
DISAGG = IMPORTS + "Frontend.link(Processor).link(VllmWorker).link(PrefillWorker)\n"


@pytest.fixture(autouse=True)
def _clean_imports() -> Iterator[None]:
    with clean_imports():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Components, and four graphs over them."""
    (tmp_path / "graphs").mkdir()
    (tmp_path / "components.py").write_text(COMPONENTS)
    (tmp_path / "graphs" / "agg.py").write_text(AGG)
    (tmp_path / "graphs" / "disagg.py").write_text(DISAGG)
    (tmp_path / "graphs" / "plain.py").write_text(IMPORTS)
    (tmp_path / "graphs" / "extended.py").write_text(
        "from components import PrefillWorker\nfrom graphs.agg import Frontend, VllmWorker\n\n"
        "VllmWorker.link(PrefillWorker)\n"
    )
    return tmp_path


def test_links_choose_what_runs_in_their_order(folder: Path) -> None:
    graph = load_graph("graphs.disagg:Frontend", base_dir=folder)

    assert list(graph.services) == ["Frontend", "Processor", "VllmWorker", "PrefillWorker"]
    assert graph.root is graph.services["Frontend"]
    assert (graph.namespace, graph.target) == ("inference", "graphs.disagg:Frontend")


def test_without_links_all_that_depends_reaches_runs(folder: Path) -> None:
    graph = load_graph("graphs.plain:Frontend", base_dir=folder)

    assert list(graph.services) == ["Frontend", "Processor", "VllmWorker", "PrefillWorker"]


def test_optional_dependency_that_is_not_linked_does_not_run(folder: Path) -> None:
    graph = load_graph("graphs.agg:Frontend", base_dir=folder)

    assert list(graph.services) == ["Frontend", "Processor", "VllmWorker"]
    assert graph.bindings("VllmWorker") == {"prefill": None}
    assert graph.bindings("Processor") == {"worker": graph.services["VllmWorker"]}


def test_a_service_inside_the_chain_can_be_the_root(folder: Path) -> None:
    assert list(load_graph("graphs.agg:Processor", base_dir=folder).services) == ["Processor", "VllmWorker"]


def test_two_graphs_of_one_process_do_not_share_links(folder: Path) -> None:
    for _ in range(2):
        assert "PrefillWorker" in load_graph("graphs.disagg:Frontend", base_dir=folder).services
        assert "PrefillWorker" not in load_graph("graphs.agg:Frontend", base_dir=folder).services


def test_a_graph_that_imports_another_has_its_links_too(folder: Path) -> None:
    load_graph("graphs.agg:Frontend", base_dir=folder)

    assert "PrefillWorker" in load_graph("graphs.extended:Frontend", base_dir=folder).services


def test_links_of_installed_modules_are_made_again(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "prebuilt.py").write_text(COMPONENTS + "\n\nFrontend.link(Processor).link(VllmWorker)\n")
    sys.path.append(str(site))
    # Not monkeypatch.syspath_prepend: it would put the folder of an earlier load back, too.
    request.addfinalizer(lambda: sys.path.remove(str(site)))

    for _ in range(2):
        graph = load_graph("prebuilt:Frontend", base_dir=tmp_path)
        assert list(graph.services) == ["Frontend", "Processor", "VllmWorker"]


def test_same_module_name_in_another_folder_is_another_module(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "graphs").mkdir()
    (other / "graphs" / "disagg.py").write_text("from dynamo_local.sdk import service\n@service\nclass Frontend: ...\n")
    load_graph("graphs.disagg:Frontend", base_dir=folder)

    assert list(load_graph("graphs.disagg:Frontend", base_dir=other).services) == ["Frontend"]


def test_a_failed_import_can_be_mended_and_loaded(folder: Path) -> None:
    broken = folder / "components.py"
    broken.write_text("raise ImportError('no driver\\nsecond line')\n")
    with pytest.raises(
        GraphError, match=r"components\.py:1: importing graphs\.agg failed with ImportError: no driver second line$"
    ):
        load_graph("graphs.agg:Frontend", base_dir=folder)
    broken.write_text(COMPONENTS)

    assert "Processor" in load_graph("graphs.agg:Frontend", base_dir=folder).services


def test_only_one_base_folder_stays_on_the_path(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    load_graph("graphs.agg:Frontend", base_dir=folder)
    other = tmp_path_factory.mktemp("other")
    with pytest.raises(GraphError, match="no module 'graphs'"):
        load_graph("graphs.agg:Frontend", base_dir=other)

    assert str(folder) not in sys.path
    assert sys.path[0] == str(other)


def test_who_puts_itself_before_the_base_folder_does_not_keep_it_on_the_path(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    """A script that was imported meanwhile. A package of the earlier folder would hide the later one's."""
    before, other = (str(tmp_path_factory.mktemp(name)) for name in ("before", "other"))
    request.addfinalizer(lambda: sys.path.remove(before))
    load_graph("graphs.agg:Frontend", base_dir=folder)
    sys.path.insert(0, before)
    load_graph("graphs.agg:Frontend", base_dir=folder)
    assert sys.path[0] == str(folder)
    with pytest.raises(GraphError, match="no module 'graphs'"):
        load_graph("graphs.agg:Frontend", base_dir=Path(other))


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"no folder .*nowhere"):
        load_graph("graphs.agg:Frontend", base_dir=tmp_path / "nowhere")


def test_dependency_on_a_twin_of_what_runs_is_two_services_of_one_name(folder: Path) -> None:
    """The linked VllmWorker is not the one that Processor depends on."""
    (folder / "graphs" / "twin.py").write_text(
        IMPORTS.replace("*", "Frontend, Processor")
        + "from dynamo_local.sdk import service\n\n\n@service\nclass VllmWorker:\n    pass\n\n\n"
        "Frontend.link(Processor).link(VllmWorker)\n"
    )
    with pytest.raises(GraphError, match=r"two services are named 'VllmWorker'.*twin\.py:5"):
        load_graph("graphs.twin:Frontend", base_dir=folder)


@pytest.mark.parametrize("target", ["graphs.disag:Frontend", "disagg:Frontend", "disag", "nothing.like.it:Frontend"])
def test_whoever_mistypes_a_graph_is_told_which_there_are(folder: Path, target: str) -> None:
    """By their source alone: one that cannot be imported, or does harm when it is, is not run for that."""
    (folder / "graphs" / "broken.py").write_text("def (")
    (folder / "graphs" / "harmful.py").write_text("raise SystemExit\n")
    (folder / "top.py").write_text(DISAGG)
    with pytest.raises(GraphError, match=r"graphs here: graphs\.agg:Frontend, graphs\.disagg:Frontend, .*top:Frontend"):
        load_graph(target, base_dir=folder)


def test_the_nearest_graph_is_suggested(folder: Path) -> None:
    with pytest.raises(GraphError, match=r"did you mean 'graphs\.disagg:Frontend'\?"):
        load_graph("graphs.disag:Frontend", base_dir=folder)


def test_a_large_folder_costs_a_mistyped_graph_little(tmp_path: Path) -> None:
    for number in range(FILES_MAX + 50):
        (tmp_path / f"module{number:04}.py").write_text("A.link(B)\n")
    (tmp_path / "a_large_one.py").write_text("A.link(B)\n" + "#" * FILE_BYTES_MAX)
    (tmp_path / "around").symlink_to(tmp_path)
    found = graphs_below(tmp_path)
    assert len(found) == FILES_MAX - 1
    assert "a_large_one:A" not in found
    with pytest.raises(GraphError) as told:
        load_graph("module:A", base_dir=tmp_path)
    assert len(str(told.value)) < 600
