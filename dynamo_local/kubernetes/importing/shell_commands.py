"""Commands of a shell script, as far as they can be read without a shell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dynamo_local.errors import ConfigError

MAX_COMMANDS = 5_000
_OPENING = ("if", "for", "while", "until", "case", "select", "function", "{", "(")
_CLOSING = ("fi", "done", "esac", "}", ")")
_BETWEEN = ("then", "do", "else", "elif", "!", "time", "in")
_BEFORE = ("nohup", "exec", "command", "sudo")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_KEPT = re.compile(r"([A-Z_][A-Z0-9_]*)=\$\{?\1\}?")
"""`-e NAME=$NAME` of docker, which is `-e NAME`."""
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?([-+?=])([^{}$]*))?\})")
_SPECIAL = re.compile(r"\$[@*#?!0-9-]|\$\(|`|\$\{")
_ENDS = ";&|\n()"


@dataclass(slots=True)
class Word:
    """A word of a command. `parts` are texts, and whether `$NAME` in them stands for a variable."""

    parts: list[tuple[str, bool]] = field(default_factory=list)
    quoted: bool = False

    @property
    def text(self) -> str:
        """As written, without quotes."""
        return "".join(text for text, _ in self.parts)

    def value(self, known: Mapping[str, str]) -> tuple[str, str | None]:
        """The word with variables filled in, and what is not known in it."""
        found: list[str] = []
        unknown: str | None = None

        def fill(match: re.Match[str]) -> str:
            nonlocal unknown
            name, how, other = match[1] or match[2], match[3], match[4]
            if name in known and (known[name] or how is None):
                return other if how == "+" else known[name]
            if how in ("-", "="):
                return other
            unknown = unknown or f"${name}"
            return match[0]

        for text, active in self.parts:
            plain = _VARIABLE.sub(fill, text) if active else text
            if active and unknown is None and (special := _SPECIAL.search(plain)) is not None:
                unknown = special[0] if special[0] != "$(" and special[0] != "`" else "the output of a command"
            found.append(plain)
        return "".join(found), unknown


@dataclass(slots=True)
class Command:
    """A simple command. `depth` counts the loops and conditions around it; `piped`: a pipe takes its output."""

    line: int
    words: list[Word]
    depth: int = 0
    piped: bool = False
    redirected: bool = False


def commands(text: str) -> Iterator[Command]:
    """The commands of a script, in their order. Raises `ConfigError` with the line of a quote that is not closed."""
    depth = 0
    for number, (line, words, ended_by, redirected) in enumerate(_split(text)):
        if number >= MAX_COMMANDS:
            raise ConfigError(f"line {line}: more than {MAX_COMMANDS:,} commands")
        while words and not words[0].quoted and words[0].text in (*_OPENING, *_CLOSING, *_BETWEEN):
            first = words.pop(0).text
            depth += (first in _OPENING) - (first in _CLOSING)
            if first in ("for", "case", "select", "function"):
                words = []
        if words:
            yield Command(line, words, max(depth, 0), ended_by == "|", redirected)
        depth += (ended_by == "(") - (ended_by == ")")


def _split(text: str) -> Iterator[tuple[int, list[Word], str, bool]]:
    """(line, words, the character that ended them, whether it is redirected). Comments are left out."""
    scan = _Scan(text)
    while not scan.ended():
        scan.redirected = False
        yield (*scan.command(), scan.redirected)


class _Scan:
    """One pass over a script's characters."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._line = text.replace("\r\n", "\n"), 0, 1
        self._heredocs: list[str] = []
        self.redirected = False
        """Whether the last command's output or input is a file."""

    def ended(self) -> bool:
        """Whether nothing is left."""
        return self._at >= len(self._text)

    def _take(self) -> str:
        char = self._text[self._at]
        self._at += 1
        self._line += char == "\n"
        return char

    def command(self) -> tuple[int, list[Word], str]:
        """The next command: its line, its words, and the character that ends it (empty at the end)."""
        words: list[Word] = []
        line = self._line
        while not self.ended():
            char = self._text[self._at]
            if char in " \t":
                self._take()
            elif self._text.startswith("\\\n", self._at):
                self._take(), self._take()
            elif char == "#":
                self._rest_of_line()
            elif char in "<>" or self._text.startswith("&>", self._at):
                self._redirection(words)
            elif self._text.startswith("((", self._at):
                self._arithmetic()
            elif char in _ENDS:
                return line, words, self._end()
            else:
                line = self._line if not words else line
                words.append(self._word())
        return line, words, ""

    def _end(self) -> str:
        char = self._take()
        if char in "&|" and self._text[self._at : self._at + 1] == char:
            self._take()
            return ";"
        if char == "\n":
            self._skip_heredocs()
        return char

    def _rest_of_line(self) -> None:
        while not self.ended() and self._text[self._at] != "\n":
            self._take()

    def _arithmetic(self) -> None:
        """`(( … ))`, of a loop or alone."""
        line = self._line
        while not self._text.startswith("))", self._at):
            if self.ended():
                raise ConfigError(f"line {line}: (( is not closed")
            self._take()
        self._take(), self._take()

    def _redirection(self, words: list[Word]) -> None:
        """`> file`, `2>&1`, `<< END`: the number before it, and the file behind it, are no words."""
        self.redirected = True
        if words and words[-1].text.isdigit() and self._text[self._at - 1].isdigit():
            words.pop()
        begin = self._at
        while not self.ended() and self._text[self._at] in "<>&|-":
            self._take()
        sign = self._text[begin : self._at]
        while not self.ended() and self._text[self._at] in " \t":
            self._take()
        if not self.ended() and self._text[self._at] not in _ENDS:
            target = self._word().text
            if sign.startswith("<<") and not sign.startswith("<<<"):
                self._heredocs.append(target)

    def _skip_heredocs(self) -> None:
        for end in self._heredocs:
            while not self.ended():
                begin = self._at
                self._rest_of_line()
                found = self._text[begin : self._at].strip()
                if not self.ended():
                    self._take()
                if found == end:
                    break
        self._heredocs.clear()

    def _word(self) -> Word:
        word = Word()
        while not self.ended():
            char = self._text[self._at]
            if char in " \t<>" or char in _ENDS:
                break
            if char == "\\":
                self._take()
                escaped = "" if self.ended() else self._take()
                word.parts.append(("" if escaped == "\n" else escaped, False))
            elif char in "'\"":
                self._quoted(word)
            elif self._text.startswith(("$(", "${"), self._at) or char == "`":
                self._substitution(word)
            else:
                word.parts.append((self._take(), True))
        word.parts = _joined(word.parts)
        return word

    def _substitution(self, word: Word) -> None:
        """`$(…)`, `${…}` and backquotes, to their end."""
        opening = self._text[self._at : self._at + 2] if self._text[self._at] == "$" else "`"
        closing = {"$(": ")", "${": "}"}.get(opening, "`")
        begin, line, depth = self._at, self._line, 0
        for _ in opening:
            self._take()
        while not self.ended():
            char = self._take()
            depth += char == opening[-1] and closing != "`"
            if char == closing:
                if depth == 0:
                    word.parts.append((self._text[begin : self._at], True))
                    return
                depth -= 1
        raise ConfigError(f"line {line}: {opening} is not closed")

    def _quoted(self, word: Word) -> None:
        quote, line = self._take(), self._line
        word.quoted = True
        while not self.ended():
            char = self._text[self._at]
            if char == quote:
                self._take()
                return
            if quote == '"' and char == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`", "\n"):
                self._take()
                escaped = self._take()
                word.parts.append(("" if escaped == "\n" else escaped, False))
            elif quote == '"' and self._text.startswith(("$(", "${"), self._at):
                self._substitution(word)
            else:
                word.parts.append((self._take(), quote == '"'))
        raise ConfigError(f"line {line}: a {quote} is not closed")


def _joined(parts: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    for text, active in parts:
        if found and found[-1][1] == active:
            found[-1] = (found[-1][0] + text, active)
        else:
            found.append((text, active))
    return found


@dataclass(frozen=True, slots=True)
class Line:
    """A command with its variables filled in. `unknown` names what could not be."""

    words: tuple[str, ...]
    env: Mapping[str, str]
    unknown: str | None = None
    missing: tuple[str, ...] = ()
    """Variables before the command whose value is not known."""


def line_of(command: Command, known: Mapping[str, str]) -> Line:
    """The words of a command behind its assignments, `nohup`, `exec` and `env`."""
    values = [(word, *word.value(known)) for word in command.words]
    env: dict[str, str] = {}
    lacking: list[str] = []
    while values:
        _, text, unknown = values[0]
        assigned = _ASSIGNED.fullmatch(text)
        if text in (*_BEFORE, "env") and len(values) > 1:
            values.pop(0)
        elif assigned is not None and not text.startswith("-"):
            if unknown is None:
                env[assigned[1]] = assigned[2]
            elif len(values) > 1:
                lacking.append(assigned[1])
            values.pop(0)
        else:
            break
    kept = [(text.partition("=")[0], None) if _KEPT.fullmatch(text) else (text, gap) for _, text, gap in values]
    unknown = next((gap for _, gap in kept if gap is not None), None)
    return Line(tuple(text for text, _ in kept), env, unknown, tuple(lacking))


def single(text: str, known: Mapping[str, str]) -> Line | None:
    """A text that is one simple command; None if it is more than that."""
    found = list(commands(text))
    if len(found) != 1 or found[0].depth or found[0].piped:
        return None
    return line_of(found[0], known)
