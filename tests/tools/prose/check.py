"""Check the language of pages, docstrings, comments and help texts: one fact a sentence, in the field's words.

    python -m tests.tools.prose [--skip RULE]... [PATH]...

Each finding is printed as `path:line: rule: message`, and any finding makes the exit code 1. Without paths, the
project's pages and code are checked. The rules:

| Rule | What it finds |
|---|---|
| `length` | a sentence of more than 30 words; inline code counts as one word |
| `opening` | a sentence that begins with Who, What, Whoever, Of, By or "That which"; questions may |
| `it` | "it" right after a semicolon |
| `line` | a line of Markdown above 120 characters; tables, code and a single long link are left alone |
| `word` | a private word in prose, such as "stimulus" |
| `name` | a private word as the name of a module, class, function, field or parameter |
| `reference` | a reference that leads nowhere, such as "lesson 12" |

Product code is checked in docstrings, comments, the texts of `help=` and `description=`, log lines and errors; tests
only in docstrings of modules and classes. Generated parts of pages are skipped: their text is checked where it is
written.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.tools.prose.words import EXCEPTIONS, MODULES, NAMES, WORDS

LONGEST_SENTENCE = 30  # words
LONGEST_LINE = 120  # characters
UNBREAKABLE = 100  # characters; a word of this length, such as a link, may make its line too long
RULES = ("length", "opening", "it", "line", "word", "name", "reference")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs")
CODE = ("dynamo_local", "state", "circus_plugins", "tests", "benchmarks")
SKIPPED_FOLDERS = frozenset({".git", ".tox", ".venv", "site", "build", "__pycache__", "node_modules", "flames"})

OPENINGS = re.compile(r"[\"'“(*_]*(Who|What|Whoever|Of|By|That which)\b(?!['’]s\b)")
IT_AFTER_SEMICOLON = re.compile(r";\s+(?:and |but |so )?it\b")
REFERENCES = re.compile(r"\b(planner-rules|circus-facts|lessons? \d+|seeds? 00\d)\b", re.IGNORECASE)

_WORDS = [(re.compile(rf"\b(?:{word})\b", re.IGNORECASE), plain) for word, plain in WORDS.items()]
_NAMES = [(re.compile(name), plain) for name, plain in NAMES.items()]
IN_CODE = re.compile(rf"(?:^|[/.])({'|'.join(MODULES)})(?:/|\.py\b|\.[a-z_]+\b|$)")
PATH_LIKE = re.compile(r"^(?:dynamo_local|tests|[a-z_0-9]+)(?:[/.][\w*]+)+/?$|^(?:autoscale|succession|twin)/?$")


@dataclass(frozen=True, slots=True)
class Finding:
    """A place and what is wrong there."""

    path: str
    line: int
    rule: str
    message: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Lines that belong together: a paragraph, a list item, a cell, a heading."""

    line: int
    text: str
    is_sentence: bool = True
    """A heading or the head of a table is none: it may begin with any word."""


_FENCE = re.compile(r"^\s*(```+|~~~+)")
_ITEM = re.compile(r"^(\s*)(?:[-*+]|\d+[.)])\s+")
_HEADING = re.compile(r"^#{1,6}\s+")
_RULE = re.compile(r"^\s*(?:[-=*_]\s*){3,}$")
_DIRECTIVE = re.compile(r"^\s*(?:!!!|\?\?\?\+?|:::|\.\. |>>>|\\b$)")
_DEFINITION = re.compile(r"^\s*\[[^\]]+\]:\s")
_CELL = re.compile(r"(?<!\\)\|")


def _without(text: str, pattern: str) -> str:
    """The text with what matches blanked out, and its line numbers kept."""
    return re.sub(pattern, lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """Markdown without front matter, generated parts and comments; lines keep their numbers."""
    text = _without(text, r"\A---\n.*?\n---\n")
    text = _without(text, r"<!-- generated: ([\w-]+) -->.*?<!-- end of \1 -->")
    return _without(text, r"<!--.*?-->")


def paragraphs(text: str, first_line: int = 1) -> Iterator[Paragraph]:
    """The paragraphs of a Markdown text, without code."""
    gathered: list[str] = []
    begin, is_code_fence, in_list, is_head = first_line, "", False, False
    lines = prose(text).splitlines()

    def close() -> Iterator[Paragraph]:
        if gathered:
            yield Paragraph(begin, " ".join(gathered))
            gathered.clear()

    for number, line in enumerate(lines, first_line):
        if fence := _FENCE.match(line):
            yield from close()
            if not is_code_fence:
                is_code_fence = fence[1]
            elif fence[1].startswith(is_code_fence):
                is_code_fence = ""
            continue
        if is_code_fence:
            continue
        stripped = line.strip().removeprefix("> ")
        if not stripped or _RULE.match(line) or _DIRECTIVE.match(line) or _DEFINITION.match(line):
            yield from close()
            continue
        if stripped.startswith("|"):
            yield from close()
            index = number - first_line + 1
            is_head = index < len(lines) and re.fullmatch(r"\s*\|[\s:|-]+\|?\s*", lines[index]) is not None
            if not re.fullmatch(r"\|[\s:|-]+\|?", stripped):
                for cell in _CELL.split(_code_out(stripped).strip("|")):
                    yield Paragraph(number, cell.strip(), is_sentence=not is_head)
            continue
        if heading := _HEADING.match(stripped):
            yield from close()
            in_list = False
            yield Paragraph(number, stripped[heading.end() :], is_sentence=False)
            continue
        if item := _ITEM.match(line):
            yield from close()
            in_list, begin = True, number
            gathered.append(line[item.end() :].strip())
            continue
        indent = len(line) - len(line.lstrip())
        if not gathered:
            if indent == 0:
                in_list = False
            if indent >= 4 and not in_list:
                continue
            begin = number
        gathered.append(stripped)
    yield from close()


_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|al|approx|resp|No|Nos|Fig|incl)\.", re.IGNORECASE)
_END = re.compile(r"(?<=[.!?…])[\"'”’)\]*_]*\s+")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")


def _code_out(text: str) -> str:
    """Inline code becomes one word."""
    return _CODE.sub("`code`", text)


def plain(text: str) -> str:
    """Inline code as one word, links as their text, no emphasis."""
    text = _LINK.sub(lambda match: match[1], _code_out(text))
    text = re.sub(r"<br\s*/?>", ". ", text)
    text = re.sub(r"</?\w[^>]*>", "", text)
    return re.sub(r"\*\*|__", "", text)


def sentences(text: str) -> Iterator[str]:
    """A paragraph's sentences."""
    text = _ABBREVIATION.sub(lambda match: match[0].replace(".", "\N{ONE DOT LEADER}"), plain(text))
    for sentence in _END.split(text):
        if sentence.strip():
            yield sentence.strip()


def count(sentence: str) -> int:
    """Its words: what has a letter or a digit, between spaces."""
    return sum(any(character.isalnum() for character in word) for word in sentence.split())


def _shown(sentence: str) -> str:
    words = sentence.split()
    return " ".join(words[:8]) + (" …" if len(words) > 8 else "")


def check_paragraph(path: str, paragraph: Paragraph) -> Iterator[Finding]:
    """What is wrong in one paragraph."""

    def found(rule: str, message: str, text: str = "") -> Finding:
        return Finding(path, paragraph.line, rule, message, text or paragraph.text)

    for sentence in sentences(paragraph.text):
        if (words := count(sentence)) > LONGEST_SENTENCE:
            yield found("length", f"{words} words in a sentence, at most {LONGEST_SENTENCE}: {_shown(sentence)}")
        opening = OPENINGS.match(sentence)
        if opening and paragraph.is_sentence and not sentence.rstrip("\"'”’)*_").endswith("?"):
            yield found("opening", f"a sentence begins with {opening[1]!r}; name the actor first: {_shown(sentence)}")
        if IT_AFTER_SEMICOLON.search(sentence):
            yield found("it", f'"it" after a semicolon; begin a new sentence, with a noun: {_shown(sentence)}')
    text = plain(paragraph.text)
    for pattern, word in _WORDS:
        if match := pattern.search(text):
            yield found("word", f"{match[0]!r} is a private word; the field says: {word}", match[0])
    if match := REFERENCES.search(text):
        yield found("reference", f"{match[0]!r} leads nowhere: say the fact, or name a page", match[0])


def check_markdown(path: str, text: str) -> Iterator[Finding]:
    """A page: its sentences, its lines, and the modules that it names."""
    for paragraph in paragraphs(text):
        yield from check_paragraph(path, paragraph)
    fence = ""
    for number, line in enumerate(prose(text).splitlines(), 1):
        if match := _FENCE.match(line):
            fence = "" if fence and match[1].startswith(fence) else fence or match[1]
            continue
        if fence:
            continue
        if len(line) > LONGEST_LINE and not _is_unbreakable(line):
            yield Finding(path, number, "line", f"{len(line)} characters, at most {LONGEST_LINE}")
        for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", line):
            if PATH_LIKE.match(code) and (match := IN_CODE.search(code)):
                yield Finding(
                    path, number, "name", f"module {match[1]!r} in {code!r}; say {MODULES[match[1]]}", match[1]
                )


def _is_unbreakable(line: str) -> bool:
    """A table's row, the definition of a link, or a line around one long link."""
    text = line.strip()
    return text.startswith("|") or bool(_DEFINITION.match(line)) or max(map(len, text.split())) >= UNBREAKABLE


def check_python(path: str, text: str, *, whole: bool = True) -> Iterator[Finding]:
    """A module: docstrings, and if `whole` is true also comments, help texts and names."""
    tree = ast.parse(text)
    for first_line, words in _strings(tree, whole=whole):
        for paragraph in paragraphs(words, first_line):
            yield from check_paragraph(path, paragraph)
    if not whole:
        return
    for first_line, words in _comments(text):
        for paragraph in paragraphs(words, first_line):
            yield from check_paragraph(path, paragraph)
    yield from _check_names(path, tree)


TEXTS = frozenset({"help", "description", "epilog", "short_help"})  # keywords whose value is prose for users
SAYING = frozenset({"debug", "info", "warning", "error", "exception", "critical", "echo"})  # methods: log, click


def _strings(tree: ast.Module, *, whole: bool) -> Iterator[tuple[int, str]]:
    """Docstrings, also those of attributes, help texts, log lines and errors; each with its first line."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef) if whole else (ast.Module, ast.ClassDef)
    for node in ast.walk(tree):
        values: list[ast.expr] = []
        if isinstance(node, owners):
            body = node.body if whole else node.body[:1]
            values = [child.value for child in body if isinstance(child, ast.Expr)]
        elif isinstance(node, ast.Call) and whole:
            values = [keyword.value for keyword in node.keywords if keyword.arg in TEXTS]
            if isinstance(node.func, ast.Attribute) and node.func.attr in SAYING:
                values += node.args[:1]
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and whole:
            values = node.exc.args[:1]
        for value in values:
            if (text := _text(value)) is not None:
                yield value.lineno, _dedented(text)


def _text(value: ast.expr) -> str | None:
    """A literal's text; what an f-string inserts counts as inline code. None if the value is no literal."""
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else None
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(part) or "`code`" for part in value.values)
    return None


def _dedented(docstring: str) -> str:
    """As `inspect.cleandoc`, but its lines keep their numbers."""
    first, *rest = docstring.expandtabs().splitlines() or [""]
    indent = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    return "\n".join([first.lstrip(), *(line[indent:] for line in rest)])


_NO_PROSE = re.compile(r"^(?:!|type:|noqa|pragma|ruff:|mypy:|fmt:|-{3,}|={3,}|pylint|isort)")


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Comments, those on lines that follow each other joined; each with its first line."""
    begun: list[str] = []
    first, last, column = 0, -1, -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, at = token.start
        words = token.string.lstrip("#").removeprefix(":").strip()
        if begun and (line != last + 1 or at != column or _NO_PROSE.match(words)):
            yield first, "\n".join(begun)
            begun = []
        if _NO_PROSE.match(words):
            continue
        if not begun:
            first = line
        begun.append(words)
        last, column = line, at
    if begun:
        yield first, "\n".join(begun)


def _check_names(path: str, tree: ast.Module) -> Iterator[Finding]:
    """The module's own name, and the names that it defines; each once."""
    for part in Path(path).with_suffix("").parts:
        if part in MODULES:
            yield Finding(path, 1, "name", f"module {part!r}; say {MODULES[part]}", part)
    said = set()
    for line, name in sorted(_defined(tree)):
        if name in said:
            continue
        said.add(name)
        bare = name.removesuffix("()")
        for pattern, better in _NAMES:
            if pattern.fullmatch(bare.lstrip("_")) or pattern.fullmatch(name.lstrip("_")):
                yield Finding(path, line, "name", f"{name!r} is a private word; the field says: {better}", bare)


def _defined(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name if isinstance(node, ast.ClassDef) else f"{node.name}()"
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def _is_exempt(finding: Finding) -> bool:
    return any(
        fnmatch.fnmatch(finding.path, known.path)
        and known.rule == finding.rule
        and re.search(known.text, finding.text) is not None
        for known in EXCEPTIONS
    )


def files(paths: Iterable[Path]) -> Iterator[Path]:
    """Pages and modules below the paths. Links to folders are left out: each file is checked once."""
    for path in paths:
        if path.is_file():
            yield path
            continue
        for found in sorted(path.rglob("*")):
            inner = found.relative_to(path).parts[:-1]
            linked = any((path / Path(*inner[: end + 1])).is_symlink() for end in range(len(inner)))
            if found.suffix in (".md", ".py") and not linked and not SKIPPED_FOLDERS & set(inner):
                yield found


def check_file(path: Path, root: Path) -> list[Finding]:
    """All findings in one file, but for the exceptions."""
    absolute = path.resolve()
    shown = absolute.relative_to(root).as_posix() if absolute.is_relative_to(root) else path.as_posix()
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        found = check_markdown(shown, text)
    else:
        found = check_python(shown, text, whole=not shown.startswith("tests/"))
    return [finding for finding in found if not _is_exempt(finding)]


def main(words: list[str] | None = None) -> int:
    """Check the paths of the command line, and say how many findings there are."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.prose",
        description="Check the language of pages, docstrings, comments and help texts.",
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="pages, modules and folders")
    parser.add_argument("--skip", action="append", default=[], choices=RULES, help="leave a rule out")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the folder that shown paths begin at")
    options = parser.parse_args(words)
    root = options.root.resolve()
    paths = options.paths or [path for name in (*PAGES, *CODE) if (path := root / name).exists()]
    found = [finding for path in files(paths) for finding in check_file(path, root)]
    found = [finding for finding in found if finding.rule not in options.skip]
    sys.stdout.writelines(f"{finding}\n" for finding in found)
    if found:
        sys.stdout.write(f"{len(found)} findings in {len({finding.path for finding in found})} files\n")
    return 1 if found else 0
