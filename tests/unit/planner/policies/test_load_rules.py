"""The load planner's rules: worked cases, and the boundaries between them."""

from __future__ import annotations

import ast
import copy
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dynamo_local.planner.policies import load
from dynamo_local.planner.policies import load_rules as rules
from tests.fakes.planner.load_cases import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(case: Case) -> None:
    case.check(case.decide())


# --- load mutations
# Each comparison, sign and number of the load planner's rules, changed one at a time, makes a worked case fail.

OTHER = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}


def _operators(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], None]]]:
    """Every other operator that this node could have."""
    if isinstance(node, ast.Compare):
        for other in OTHER.get(type(node.ops[0]), ()):
            yield "ops", lambda n, other=other: n.ops.__setitem__(0, other())  # type: ignore[misc]
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        for other in OTHER.get(type(node.op), ()):
            yield "op", lambda n, other=other: setattr(n, "op", other())  # type: ignore[misc]


def _numbers(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], None]]]:
    """Every other number that this one could be."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        for other in (node.value + 1, node.value - 1):
            yield "value", lambda n, other=other: setattr(n, "value", other)  # type: ignore[misc]


def mutants(source: str, before_line: float = math.inf) -> list[tuple[str, ast.Module]]:
    """`(what was changed, the module with it)`; all changes are above that line."""
    tree = ast.parse(source)
    found = []
    for index, node in enumerate(ast.walk(tree)):
        if getattr(node, "lineno", 0) >= before_line:
            continue
        for _, change in (*_operators(node), *_numbers(node)):
            mutant = copy.deepcopy(tree)
            target = list(ast.walk(mutant))[index]
            change(target)
            changed = f"line {node.lineno}: {ast.unparse(node)} -> {ast.unparse(target)}"  # type: ignore[attr-defined]
            found.append((changed, mutant))
    return found


def run(tree: ast.Module, original: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The changed module in place of the original."""
    assert original.__file__ is not None
    module = ModuleType(original.__name__)
    monkeypatch.setitem(sys.modules, original.__name__, module)
    exec(compile(tree, original.__file__, "exec"), module.__dict__)
    return module


def survives(policy: Callable[..., Any]) -> bool:
    """No case fails."""
    try:
        for case in CASES:
            case.check(case.decide(policy))
    except Exception:
        return False
    return True


def _source(module: ModuleType) -> str:
    assert module.__file__ is not None
    return Path(module.__file__).read_text()


def test_every_mutant_of_the_rules_fails_a_case() -> None:
    """Else a rule could change and nobody would know. The code behind the rules only explains them."""
    source, alive = _source(rules), []
    explaining = source[: source.index("class _Change")].count("\n") + 1
    for changed, tree in mutants(source, before_line=explaining):
        with pytest.MonkeyPatch.context() as patch:
            try:
                run(tree, rules, patch)
                policy = run(ast.parse(_source(load)), load, patch).LoadPolicy
            except Exception:
                continue
            if survives(policy):
                alive.append(changed)
    assert alive == []


def test_every_mutant_of_the_measuring_fails_a_case() -> None:
    alive = []
    for changed, tree in mutants(_source(load)):
        with pytest.MonkeyPatch.context() as patch:
            if survives(run(tree, load, patch).LoadPolicy):
                alive.append(changed)
    assert alive == []
