"""The pages as a site: each is in the navigation, none is too long, and links hold once they are staged."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from tests.tools.pages import ROOT, without_blocks

LONGEST_PAGE = 250  # lines
LONGEST_OVERVIEW = 150  # lines of architecture.md
GROUPS = ["Start", "How-to", "Reference", "Explanation"]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def _website() -> ModuleType:
    """`docs/website.py`, which is a script and no package."""
    spec = importlib.util.spec_from_file_location("docs_website", ROOT / "docs" / "website.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_website"] = module
    spec.loader.exec_module(module)
    return module


WEBSITE = _website()


@pytest.fixture
def staged(tmp_path, monkeypatch):
    monkeypatch.setattr(WEBSITE, "STAGED", tmp_path / "pages")
    WEBSITE.stage()
    return tmp_path / "pages"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_is_too_long(page) -> None:
    lines = len(page.read_text(encoding="utf-8").splitlines())
    assert lines <= (LONGEST_OVERVIEW if page.name == "architecture.md" else LONGEST_PAGE)


def test_the_navigation_has_four_groups_and_each_page_once() -> None:
    groups, _, names = zip(*WEBSITE.navigation(), strict=True)
    assert list(dict.fromkeys(groups)) == GROUPS
    assert sorted(names) == sorted(WEBSITE.pages().values())


def test_links_of_the_site_lead_to_staged_files(staged) -> None:
    links = re.compile(r"\]\((?P<path>[^)#\s:]+)(?:#[^)\s]*)?\)")
    broken = [
        f"{page.name}: {match['path']}"
        for page in sorted(staged.glob("*.md"))
        for match in links.finditer(without_blocks(page))
        if not (staged / match["path"]).exists()
    ]
    assert broken == []


def test_the_index_for_models_has_each_page(staged) -> None:
    index = (staged / "llms.txt").read_text(encoding="utf-8")
    assert index.startswith("# dynamo-local\n\n> ")
    assert set(re.findall(r"\]\(([^)]+)\):", index)) == set(WEBSITE.pages().values())


def test_the_readme_ends_with_eight_links() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").rstrip().split("\n\n")[-2]
    rows = table.splitlines()[2:]
    assert len(rows) == 8
    assert all(len(re.findall(r"\]\(", row)) == 1 for row in rows)
