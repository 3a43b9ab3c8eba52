"""A hostile file is refused in one line, and at once. `serve -f` and `import` read by the same bounded loader."""

from __future__ import annotations

import pytest

from dynamo_local.config.yaml_text import MAX_CHARACTERS, located_mapping, manifests, parse_yaml
from dynamo_local.errors import ConfigError

LAUGHS = "\n".join(["a0: &a0 [lol]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30))])
MERGES = "\n".join(
    ["a0: &a0 {k: v}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 30))]
)
HOSTILE = {
    "billion laughs": (LAUGHS, "line 5: more than 20,000 keys and values"),
    "billion merges": (MERGES, "more than 20,000 keys and values"),
    "an alias of itself": ("a: &a {b: [*a]}", "line 1: an alias of something that holds it"),
    "brackets": ("a: " + "[" * 100_000, "line 1: nested more than 50 deep"),
    "nested blocks": ("\n".join(f"{' ' * n}a:" for n in range(2_000)), "line 50: nested more than 50 deep"),
    "hexadecimal digits": ("a: {port: 0x" + "f" * 50_000 + "}", "line 1: a number of 50,002 digits; 64 at most"),
    "decimal digits": ("a: {port: " + "9" * 50_000 + "}", "line 1: a number of 50,000 digits"),
    "many keys": ("a: [" + "1, " * 30_000 + "]", "more than 20,000 keys and values"),
    "a long text": ("a: " + "x" * MAX_CHARACTERS, "4,194,307 characters; a file has 4,194,304 at most"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("read", [parse_yaml, manifests])
def test_a_hostile_file_is_refused_in_one_line(name: str, read: object) -> None:
    text, why = HOSTILE[name]
    with pytest.raises(ConfigError) as refused:
        read(text, "c.yaml")  # type: ignore[operator]
    assert str(refused.value).startswith("c.yaml: ")
    assert why in str(refused.value)
    assert len(str(refused.value)) < 200


def test_lines_of_values_are_those_of_their_keys() -> None:
    document = located_mapping("a:\n  b: 1\n  c:\n    - x\n    - y: 2\n", "c.yaml", what="anything")
    assert document.lines[("a", "b")] == 2
    assert document.lines[("a", "c", 1)] == 5
    assert document.lines[("a", "c", 1, "y")] == 5
