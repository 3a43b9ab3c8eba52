"""Build the site: the pages of docs/, with README, CONTRIBUTING and CHANGELOG, as `mkdocs.yml` arranges them.

    python docs/website.py [--pages-only]

The pages are written for the forge too, so they link to files outside docs/ by relative paths. This program copies
the pages to build/pages and changes those links: the three pages at the top become pages of the site, and any other
file is copied beside them. It also writes llms.txt (an index of the pages) and llms-full.txt (their text).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
STAGED = ROOT / "build" / "pages"
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
ASSETS = (".svg", ".png", ".webp", ".service")
LINK = re.compile(r"(?P<before>\]\()(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?P<after>\))")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def pages() -> dict[Path, str]:
    """Each page of the repository that is on the site -> its name there."""
    top = {ROOT / name: shown for name, shown in TOP.items()}
    below = {page: page.name for page in sorted((ROOT / "docs").glob("*.md"))}
    return top | below | {ROOT / "docs" / "README.md": "pages.md"}


def stage() -> None:
    """Write build/pages anew."""
    shutil.rmtree(STAGED, ignore_errors=True)
    STAGED.mkdir(parents=True)
    known = pages()
    for page, name in known.items():
        (STAGED / name).write_text(_relinked(page, known), encoding="utf-8")
    for asset in (ROOT / "docs").iterdir():
        if asset.suffix in ASSETS:
            shutil.copy(asset, STAGED)
    index, whole = _for_models()
    (STAGED / "llms.txt").write_text(index, encoding="utf-8")
    (STAGED / "llms-full.txt").write_text(whole, encoding="utf-8")


def _relinked(page: Path, known: dict[Path, str]) -> str:
    """The page's text with links that hold on the site. Code is left as it is."""

    def link(match: re.Match[str]) -> str:
        target = (page.parent / match["path"]).resolve()
        if ":" in match["path"] or not target.exists():
            return match[0]  # another site, or a link that is broken: the build says so
        name = known.get(target) or _copied(target)
        return f"{match['before']}{name}{match['anchor'] or ''}{match['after']}"

    parts = FENCE.split(page.read_text(encoding="utf-8"))
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def _copied(target: Path) -> str:
    """A file outside docs/ beside the pages, as text that a browser shows; an asset of docs/ under its own name."""
    if target.parent == ROOT / "docs" and target.suffix in ASSETS:
        return target.name
    if target.is_dir():
        raise SystemExit(f"{target.relative_to(ROOT)} is a folder: a page of the site cannot link to it")
    name = "files/" + "-".join(target.relative_to(ROOT).parts) + ".txt"
    (STAGED / "files").mkdir(exist_ok=True)
    shutil.copy(target, STAGED / name)
    return name


# --- llms.txt -------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Reads `mkdocs.yml` without calling the functions that its tags name."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def navigation() -> Iterator[tuple[str, str, str]]:
    """Group, title and name of each page, as `mkdocs.yml` arranges them."""
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)
    for group in config["nav"]:
        for title, entries in group.items():
            for entry in _flat(entries):
                yield title, *entry


def _flat(entries: list[dict[str, object]]) -> Iterator[tuple[str, str]]:
    for entry in entries:
        for title, value in entry.items():
            if isinstance(value, list):
                yield from _flat(value)
            else:
                yield title, str(value)


def _for_models() -> tuple[str, str]:
    """llms.txt (https://llmstxt.org) and the text of all pages in the same order."""
    summary = _first_sentence((STAGED / "index.md").read_text(encoding="utf-8"))
    index, whole, last = [f"# dynamo-local\n\n> {summary}\n"], [], ""
    for group, title, name in navigation():
        text = (STAGED / name).read_text(encoding="utf-8")
        if group != last:
            index.append(f"\n## {group}\n")
            last = group
        index.append(f"- [{title}]({name}): {_first_sentence(text)}")
        whole.append(f"<!-- {name} -->\n\n{text.strip()}\n")
    return "\n".join(index) + "\n", "\n".join(whole)


def _first_sentence(text: str) -> str:
    """The first sentence below the page's title, without links."""
    body = re.split(r"^# .*$", FENCE.sub("", text), maxsplit=1, flags=re.MULTILINE)[-1]
    paragraph = next((part for part in body.split("\n\n") if re.match(r"\s*[\w`*\[\"]", part)), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=\.) ", plain)[0]


def main() -> int:
    """Stage the pages, then build the site from them. Any warning, such as a link that leads nowhere, is an error."""
    parser = argparse.ArgumentParser(description="Build the site in build/site.")
    parser.add_argument("--pages-only", action="store_true", help="write build/pages and build nothing")
    if parser.parse_args().pages_only:
        stage()
        return 0
    stage()
    return subprocess.run(
        ["zensical", "build", "--strict", "--clean", "-f", "mkdocs.yml"], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
