"""Links of the pages lead somewhere."""

from __future__ import annotations

import re

import pytest

from tests.tools.pages import ROOT, anchors, pages, shown, without_blocks

_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def _links(page):
    return [match["target"] for match in _LINK.finditer(without_blocks(page))]


@pytest.mark.parametrize("page", pages(), ids=shown)
def test_relative_links_resolve(page):
    broken = []
    for target in _links(page):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path).resolve()
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_every_page_can_be_reached_from_the_readme():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached:
            continue
        reached.add(page)
        files = ((page.parent / target.partition("#")[0]).resolve() for target in _links(page) if ":" not in target)
        todo += [file for file in files if file.suffix == ".md" and file.is_file()]
    assert {shown(page) for page in pages() if page.parent.name == "docs"} <= {shown(page) for page in reached}
