"""Values for a JSON schema fit it, are the same again, and cost no more than a budget."""

from __future__ import annotations

import contextlib
import json
import re
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.components.sim_api.schema_values import MAX_CHARS, Unfit, text_matching, value_of
from dynamo_local.errors import InvalidRequest

NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["v", "kids"],
}
SCHEMAS: list[Any] = [
    True,
    {},
    {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"const": 5}}},
    {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "null"}]},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    {"type": "array", "maxItems": 0},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "maximum": -5},
    {"type": "number", "multipleOf": 0.25, "minimum": 1, "maximum": 1.5},
    {"type": "integer", "exclusiveMinimum": 6, "maximum": 7},
    {"type": "integer", "multipleOf": 7, "minimum": 20, "maximum": 30},
    {"type": "string", "minLength": 50, "maxLength": 51},
    {"type": "string", "pattern": r"^[A-Z]{2}-\d{4}$"},
    {"type": "string", "pattern": r"^(a|bc)+$", "minLength": 2},
    {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "zz"], "maxProperties": 2},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"required": ["b"]}]},
    {"allOf": [{"minimum": 3}, {"type": "number", "maximum": 4}]},
    {"type": "object", "properties": {"k": {"const": "cat"}, "n": {"$ref": "#/$defs/s", "maxLength": 4}},
     "required": ["k", "n"], "$defs": {"s": {"type": "string", "minLength": 2}}},
    *({"type": "string", "format": form} for form in ("date", "time", "date-time", "email", "uuid", "ipv4", "uri")),
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_a_value_fits_its_schema(schema: Any):
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    value = value_of(schema, "p")
    validator.validate(value)
    assert value == value_of(schema, "p")


leaves = st.one_of(
    st.fixed_dictionaries({"type": st.just("integer")}, optional={"minimum": st.integers(-9, 0)}),
    st.fixed_dictionaries({"type": st.just("integer"), "multipleOf": st.integers(1, 9)}),
    st.fixed_dictionaries({"type": st.just("number"), "exclusiveMinimum": st.floats(-1e6, 1e6)}),
    st.fixed_dictionaries({"type": st.just("string")}, optional={"minLength": st.integers(0, 30)}),
    st.fixed_dictionaries(
        {"enum": st.lists(st.one_of(st.none(), st.integers(-9, 9), st.text(max_size=5)), min_size=1)}
    ),
    st.just({"type": "boolean"}),
)
names = st.text(alphabet="abcdef", min_size=1, max_size=3)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(
            lambda members: {"type": "object", "properties": members, "required": sorted(members)},
            st.dictionaries(names, inner, max_size=4),
        ),
        st.builds(lambda item, least: {"type": "array", "items": item, "minItems": least}, inner, st.integers(0, 3)),
        st.builds(lambda branches: {"anyOf": branches}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=12,
)


@settings(max_examples=30)
@given(schema=schemas)
def test_any_schema_of_the_usual_keywords_has_a_value(schema: Any):
    jsonschema.validate(value_of(schema, "p"), schema, cls=jsonschema.Draft202012Validator)


LOOP = {"$ref": "#"}
HOSTILE = {
    "a reference to itself": LOOP,
    "references that double": {"allOf": [LOOP, LOOP]},
    "choices that double": {"anyOf": [LOOP, LOOP]},
    "billion laughs": {
        "$ref": "#/$defs/0",
        "$defs": {str(n): {"type": "array", "minItems": 10, "items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(30)},
    },
    "an object within itself": {"type": "object", "required": ["a"], "properties": {"a": LOOP}},
    "classes of a pattern, often": {"type": "string", "pattern": "[\u024f]?" * 800, "minLength": 1},
    "many items": {"type": "array", "minItems": 10**8},
    "large items": {"type": "array", "minItems": 4000, "items": {"const": "x" * 60_000}},
    "a long string": {"type": "string", "minLength": 10**7},
    "a long pattern": {"type": "string", "pattern": "((a{1000}){1000}){1000}"},
    "an empty pattern, often": {"type": "string", "pattern": "((){1000}){1000}"},
    "a deep pattern": {"type": "string", "pattern": "(" * 4000},
    "patterns, often": {
        "type": "object",
        "properties": {f"p{n}": {"$ref": "#/$defs/p"} for n in range(5000)},
        "$defs": {"p": {"type": "string", "pattern": "((){1000}){1000}"}},
    },
    "wide loops": {
        "type": "object",
        "properties": {f"p{n}": {"anyOf": [LOOP, LOOP]} for n in range(3000)},
        "required": ["p0"],
    },
    "members that nobody has": {"type": "object", "minProperties": 5000},
    "a pattern that backtracks": {"const": "a" * 40 + "!", "oneOf": [{}, {"pattern": "^(a+)+$"}]},
    "a pattern that backtracks behind $schema": {
        "const": "a" * 40 + "!",
        "oneOf": [{}, {"$schema": "https://json-schema.org/draft/2020-12/schema", "pattern": "^(a+)+$"}],
    },
    "a check that doubles": {
        "oneOf": [{"const": 1}, {"$ref": "#/$defs/0"}],
        "$defs": {str(n): {"oneOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2, "type": "null"} for n in range(40)},
    },
    "a check that doubles elsewhere": {
        "$ref": "#/$defs/0",
        "$defs": {
            **{
                str(n): {"anyOf": [False, {"$ref": f"#/$defs/{n + 1}"}, {"$ref": f"#/$defs/{n + 1}"}]}
                for n in range(25)
            },
            "25": {"allOf": [{"type": "integer"}, {"multipleOf": 0.7}, {"minimum": 3}]},
        },
    },
}


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_schema_ends_with_its_budget(schema: Any):
    """It is refused, or gives a value no larger than the bound, within the processor's seconds that a budget takes."""
    began_s = time.process_time()
    with contextlib.suppress(InvalidRequest):
        assert len(json.dumps(value_of(schema, "response_format"))) < 2 * MAX_CHARS
    assert time.process_time() - began_s < 2


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (False, "`false`"),
        ({"type": "strnig"}, "strnig"),
        ({"not": {}}, "`not`"),
        ({"if": {}}, "`if`"),
        ({"propertyNames": {"pattern": "a"}}, "`propertyNames`"),
        ({"type": "array", "contains": {}}, "`contains`"),
        ({"$ref": "https://example.com/x"}, "`$ref`"),
        ({"$ref": "#/$defs/none"}, "`$ref` points to nothing"),
        ({"properties": []}, "is not of type 'object'"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "`minimum`"),
        ({"type": "integer", "minimum": "a"}, "'a'"),
        ({"type": "string", "minLength": -1}, "-1"),
        ({"type": "string", "pattern": "("}, "'('"),
        ({"type": "string", "pattern": "(?=a)b"}, "ASSERT"),
        ({"type": "string", "pattern": r"(a)\1"}, "GROUPREF"),
        ({"allOf": [{"const": 1}, {"const": 2}]}, "`const`"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "`pattern`"),
        ({"type": "string", "pattern": "ab", "maxLength": 1}, "`pattern`"),
        ({"type": "object", "minProperties": 1}, "`minProperties`"),
        ({"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "minItems": 2}, "uniqueItems"),
    ],
)
def test_what_cannot_be_made_says_why(schema: Any, words: str):
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        value_of(schema, "response_format")


@pytest.mark.parametrize(
    "pattern",
    ["", "abc", "a|b|cd", r"\d{3}-\w+", "[^a-z]+", "(ab)?c*", "[A-Z][a-z]{2,5}", r"^\s\S$", "a{2}.?", "é+", "[^\\d]"],
)
def test_a_text_is_matched_by_its_pattern(pattern: str):
    for repetitions in range(4):
        assert re.fullmatch(pattern, text_matching(pattern, repetitions)) is not None


@pytest.mark.parametrize(
    "pattern", ["a$b", "a^b", r"a\bb", "a{20000}", "(?<=a)b", r"(x|y)\1", "[" * 50, "x" * 5000, r"\ud800"]
)
def test_a_pattern_that_is_not_known_is_refused(pattern: str):
    with pytest.raises(Unfit):
        text_matching(pattern)
