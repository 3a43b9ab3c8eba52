"""The checker of the project's language finds what it should, and nothing else."""

from __future__ import annotations

import pytest

from tests.tools.prose.check import check_markdown, check_python, main, sentences


def rules(text: str) -> list[tuple[int, str]]:
    return [(found.line, found.rule) for found in check_markdown("docs/page.md", text)]


def names(text: str) -> list[tuple[int, str]]:
    return [(found.line, found.rule) for found in check_python("dynamo_local/module.py", text)]


LONG = "word " * 31


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The arbiter starts workers.\n", []),
        (f"{LONG.strip()}.\n", [(1, "length"), (1, "line")]),
        ("# Title\n\nWho serves takes connections.\n", [(3, "opening")]),
        ("First. Of those, one.\n", [(1, "opening")]),
        ("What is missing?\n", []),
        ("## What is missing\n", []),
        ("The lease ends; it may end early.\n", [(1, "it")]),
        ("The item is a stimulus.\n", [(1, "word")]),
        ("See lesson 12.\n", [(1, "reference")]),
        ("The code is in `twin/fleet.py`.\n", [(1, "name")]),
        ("The option `--guest-x` is `lapsed`.\n", []),
        ("word\n" * 31, [(1, "length")]),
    ],
)
def test_a_page_is_checked(text: str, expected: list[tuple[int, str]]) -> None:
    assert rules(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        f"```sh\n{LONG * 2}\n```\n",
        "Text:\n\n" + "    word word word\n" * 20,
        f"---\ntitle: {LONG * 2}\n---\n",
        f"<!-- generated: part -->\n| {LONG * 2} |\n<!-- end of part -->\n",
        f"| {'word ' * 20} | {'word ' * 20} |\n",
        f"* [text](https://host/{'x' * 120})\n",
        f"[name]: https://host/{'x' * 120}\n",
        f"A word.\n`{'word ' * 20}` is one word,\nand so is the link [`{'word ' * 16}`](page.md).\n",
    ],
)
def test_code_and_tables_are_left_alone(text: str) -> None:
    assert rules(text) == []


def test_cells_and_items_are_sentences_of_their_own() -> None:
    text = f"| Name | What |\n|---|---|\n| a | What it is |\n| b | {LONG} |\n\n* one\n* Of two\n"
    assert rules(text) == [(3, "opening"), (4, "length"), (7, "opening")]


def test_abbreviations_end_no_sentence() -> None:
    assert list(sentences("It runs, e.g. here. [Link](a.md) ends. `code.py` too!")) == [
        "It runs, e\N{ONE DOT LEADER}g\N{ONE DOT LEADER} here.",
        "Link ends.",
        "`code` too!",
    ]


MODULE = '''"""Module."""

# Who reads this
# is told.
limit = 3  # By default.


class Shell:
    """Of a deployment."""

    lapsed: bool = False
    """What it means."""


def run(headed: str) -> None:
    """Run."""
    option(help="Whoever runs.")
    log.info("What %s runs.", headed)
    raise ValueError(f"{headed}. Of no use.")
'''


def test_a_module_is_checked_in_docstrings_comments_messages_and_names() -> None:
    assert sorted(names(MODULE)) == [
        (3, "opening"),
        (5, "opening"),
        (8, "name"),
        (9, "opening"),
        (11, "name"),
        (12, "opening"),
        (15, "name"),
        (17, "opening"),
        (18, "opening"),
        (19, "opening"),
    ]


def test_of_tests_only_docstrings_of_modules_and_classes_are_checked() -> None:
    found = check_python("tests/unit/test_module.py", MODULE, whole=False)
    assert [(one.line, one.rule) for one in found] == [(9, "opening")]


def test_findings_are_printed_and_make_the_exit_code_1(tmp_path, capsys) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("Who reads?\n\nWho reads, knows.\n")
    assert main(["--root", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("docs/page.md:3: opening: a sentence begins with 'Who'")
    assert main(["--root", str(tmp_path), "--skip", "opening"]) == 0
