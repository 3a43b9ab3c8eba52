"""Generated requests have the rate, bursts, lengths and shared beginnings asked for, and are the same everywhere."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter, deque
from itertools import islice, pairwise
from random import Random
from typing import Any

import pytest

from dynamo_local.simulator import generator as prefixes
from dynamo_local.simulator.generator import (
    KINDS,
    BadGenerate,
    GeneratorOptions,
    arrivals,
    expected_by,
    generate,
    parse_generated,
)
from dynamo_local.simulator.trace import HASH_BLOCK_TOKENS, TraceRequest
from tests.tools.peak_memory import peak_bytes


def made(word: str) -> list[TraceRequest]:
    return list(generate(parse_generated(word).options))


def reused(rows: list[TraceRequest]) -> float:
    """Share of the prompt tokens that an endless cache of full blocks had; a prompt's last token is always computed."""
    seen: set[int] = set()
    found = 0
    for row in rows:
        blocks = row.hash_ids[: row.input_length // HASH_BLOCK_TOKENS]
        found += sum(block in seen for block in blocks[: (row.input_length - 1) // HASH_BLOCK_TOKENS])
        seen.update(blocks)
    return found * HASH_BLOCK_TOKENS / sum(row.input_length for row in rows)


def gaps_cv(times_s: list[float]) -> float:
    """Coefficient of variation of the gaps."""
    gaps = [after - before for before, after in pairwise(times_s)]
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


# --- the same everywhere -----------------------------------------------------------------------


def test_the_same_options_give_the_same_requests_and_another_seed_others() -> None:
    assert made("chat,duration=300") == made("chat,duration=300,seed=0")
    assert made("chat,duration=300") != made("chat,duration=300,seed=1")


@pytest.mark.parametrize(
    ("word", "digest"),
    [
        ("chat,duration=600", "68b106cebc8a255b"),
        ("code,duration=600", "7d5de9e3aebe4414"),
        ("sin,duration=150", "0d5b9c63e61e064e"),
        ("chat,duration=600,period=300,amplitude=0.8,cv=3,system=2048,systems=5", "508ff2487c987092"),
    ],
)
def test_what_is_made_is_the_same_on_every_python_and_machine(word: str, digest: str) -> None:
    text = "\n".join(f"{r.at_s:.3f} {r.input_length} {r.output_length} {r.hash_ids}" for r in made(word))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_another_length_moves_no_arrival() -> None:
    """So that two loads which differ in one number can be compared request by request."""
    short, long = made("chat,duration=300"), made("chat,duration=300,isl=9000")
    assert [row.at_s for row in short] == [row.at_s for row in long]
    assert [row.output_length for row in short] == [row.output_length for row in long]


# --- arrivals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cv", [0.0, 1e-300, 0.001, 0.5, 1.0, 2.0])
def test_rate_and_burstiness_are_those_asked_for(cv: float) -> None:
    times_s = [row.at_s for row in made(f"code,rate=5,duration=4000,cv={cv},isl=1,osl=1")]
    assert len(times_s) == pytest.approx(20_000, abs=3 * cv * math.sqrt(20_000) + 1)
    assert gaps_cv(times_s) == pytest.approx(cv, rel=0.1, abs=0.01)


def test_times_begin_at_zero_ascend_and_end_before_the_duration() -> None:
    for kind in KINDS:
        times_s = [row.at_s for row in made(f"{kind},duration=900,cv=3")]
        assert times_s[0] == 0
        assert times_s == sorted(times_s)
        assert times_s[-1] <= 900


def test_the_sinusoid_has_its_lows_and_highs_where_it_says() -> None:
    """Dynamo's load: 5 requests per second at the lows (0, 150, … s), 20 at the highs. Means over ten periods."""
    times_s = [row.at_s for row in made("sin,duration=1500")]
    by_phase = Counter(int(at_s % 150 // 15) for at_s in times_s)
    rates = [by_phase[part] / 150 for part in range(10)]  # requests per second, in each tenth of a period
    promised = [12.5 - 7.5 * math.cos(2 * math.pi * (part + 0.5) / 10) for part in range(10)]
    assert rates == pytest.approx(promised, rel=0.15)
    assert len(times_s) == pytest.approx(12.5 * 1500, rel=0.03)


def test_a_trace_may_begin_at_any_moment_of_the_period() -> None:
    low = made("sin,duration=15")
    high = made("sin,duration=15,start=75")
    assert len(low) < 15 * 12.5 < len(high)


@pytest.mark.parametrize("amplitude", [0.3, 1.0])
@pytest.mark.parametrize("start", [0.0, 40.0])
def test_arrivals_of_a_clock_come_when_so_many_are_expected(amplitude: float, start: float) -> None:
    word = f"sin,duration=450,cv=0,amplitude={amplitude},start={start},rate=2"
    options = parse_generated(word).options
    found = [expected_by(options, at_s) for at_s in arrivals(options, Random(0))]
    assert found == pytest.approx(range(len(found)), abs=1e-4)
    assert len(found) == pytest.approx(900, abs=2)


# --- lengths -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chat", "code"])
def test_lengths_have_the_median_and_the_spread_asked_for(kind: str) -> None:
    word = parse_generated(f"{kind},rate=20,duration=1000,cv=1")
    rows = list(generate(word.options))
    for name, lengths in (("isl", [r.input_length for r in rows]), ("osl", [r.output_length for r in rows])):
        median, sigma = getattr(word.options, name), getattr(word.options, f"{name}_sigma")
        lower, middle, upper = statistics.quantiles(lengths, n=4)
        assert middle == pytest.approx(median, rel=0.05)
        assert math.log(upper / lower) == pytest.approx(2 * 0.6745 * sigma, rel=0.1)


def test_the_kinds_have_the_published_figures() -> None:
    chat, code = made("chat,duration=10800"), made("code,duration=10800")
    assert len(chat) / 10_800 == pytest.approx(3.4, rel=0.06)
    assert statistics.fmean(row.input_length for row in chat) == pytest.approx(12_035, rel=0.04)
    assert statistics.fmean(row.output_length for row in chat) == pytest.approx(343, rel=0.04)
    assert len(code) / 10_800 == pytest.approx(2.57, rel=0.06)
    assert statistics.median(row.input_length for row in code) == pytest.approx(1500, rel=0.04)
    assert statistics.median(row.output_length for row in code) == pytest.approx(13, abs=1)
    assert statistics.quantiles((row.input_length for row in code), n=20)[-1] == pytest.approx(7302, rel=0.05)


def test_lengths_keep_their_bounds_and_without_a_spread_are_all_alike() -> None:
    rows = made("code,isl=1000,isl-sigma=2,isl-max=2000,osl=2,osl-sigma=2,osl-max=3,duration=600")
    assert {r.output_length for r in rows} == {1, 2, 3}
    assert max(r.input_length for r in rows) == 2000
    assert {(r.input_length, r.output_length) for r in made("sin,duration=20")} == {(3000, 150)}


# --- shared beginnings -------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.4, 0.6])
def test_an_endless_cache_would_have_the_share_asked_for(share: float) -> None:
    """Counted from the ids alone, as an engine would find them."""
    assert reused(made(f"chat,reuse={share}")) == pytest.approx(share, abs=0.02)


def test_no_reuse_is_none() -> None:
    rows = made("code,duration=600")
    ids = [block for row in rows for block in row.hash_ids]
    assert len(ids) == len(set(ids))


def test_as_many_prompts_of_a_chat_go_on_from_another_as_in_the_recorded_one() -> None:
    """38 % of Mooncake's do (beyond the first block, which all share); each goes on from one that came before."""
    seen: set[int] = set()
    going_on = 0
    rows = made("chat")
    for row in rows:
        going_on += len(row.hash_ids) > 1 and row.hash_ids[1] in seen
        seen.update(row.hash_ids)
    assert going_on / len(rows) == pytest.approx(0.385, abs=0.05)


def test_a_prompt_that_goes_on_holds_the_last_one_its_answer_and_something_new() -> None:
    """Within a conversation prompts grow, and blocks once shared are never given to another conversation."""
    last: dict[int, TraceRequest] = {}  # by the last full block that it shares
    grown = 0
    for row in made("chat,system=0,duration=1200"):
        full = row.hash_ids[: row.input_length // HASH_BLOCK_TOKENS]
        before = next((last.pop(block) for block in reversed(full) if block in last), None)
        if before is not None:
            grown += 1
            assert row.input_length > before.input_length + before.output_length
            assert row.at_s - before.at_s >= 30, "a pause lasts half of `think` at least"
            held = before.hash_ids[: before.input_length // HASH_BLOCK_TOKENS]
            assert row.hash_ids[: len(held)] == held
        if full:
            last[full[-1]] = row
    assert grown > 500


def test_system_prompts_are_shared_by_their_popularity() -> None:
    """Of four the first is taken four times as often as the last; prompts too short for it have a part of it."""
    rows = made("chat,reuse=0,system=1500,systems=4,rate=20,duration=600")
    firsts = Counter(row.hash_ids[0] for row in rows if row.input_length >= HASH_BLOCK_TOKENS)
    assert sorted(firsts) == [0, 2, 4, 6], "1,500 tokens are two whole blocks"
    assert firsts[0] / firsts[6] == pytest.approx(4, rel=0.2)
    assert {row.hash_ids[:2] for row in rows if row.input_length >= 1024} == {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_ids_cover_the_prompt_and_no_more() -> None:
    for row in made("chat,duration=300"):
        assert len(row.hash_ids) == math.ceil(row.input_length / HASH_BLOCK_TOKENS)


# --- size --------------------------------------------------------------------------------------


def test_requests_are_made_one_at_a_time() -> None:
    """Five million of them could be asked for: the first come at once, and take no more memory than they need."""
    options = parse_generated("chat,rate=50,duration=100000,isl=2000").options
    assert peak_bytes(lambda: deque(islice(generate(options), 4_000), maxlen=0)) < 16 * 2**20


@pytest.mark.parametrize(("think", "most"), [(0, 0.61), (60, 0.5), (3600, 0.1)])
def test_conversations_beyond_what_is_remembered_are_forgotten(
    think: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest that may go on, or the new one where all still pause: prompts stay whole, and fewer go on."""
    monkeypatch.setattr(prefixes, "OPEN_MAX", 20)
    rows = made(f"chat,system=0,reuse=0.6,think={think},duration=1800")
    assert all(len(row.hash_ids) == math.ceil(row.input_length / HASH_BLOCK_TOKENS) for row in rows)
    assert reused(rows) < most


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("", "'' is no kind of load; one of chat, code, sin"),
        ("chatt", "did you mean 'chat'?"),
        ("chat,rat=3", "unknown key 'rat'"),
        ("chat,rat=3", "did you mean 'rate'?"),
        ("chat,rate", "'rate' is no KEY=VALUE"),
        ("chat,", "'' is no KEY=VALUE"),
        ("chat,rate=1,rate=2", "rate is given twice"),
        ("chat,isl-max=9000,isl_max=9000", "isl_max is given twice"),
        ("chat,rate=-1", "rate: must be greater than 0"),
        ("chat,rate=nan", "rate: must be a finite number"),
        ("chat,rate=1e9", "rate: must be less than or equal to 10000"),
        ("chat,rate=many", "rate: must be a valid number"),
        ("chat,seed=1.5", "seed: must be a valid integer"),
        ("chat,cv=9", "cv: must be less than or equal to 5"),
        ("chat,amplitude=1.2", "amplitude: must be less than or equal to 1"),
        ("chat,reuse=1", "reuse: must be less than or equal to 0.9"),
        ("chat,osl=0", "osl: must be greater than or equal to 1"),
        ("chat,isl=200000", "isl is the median, 200000, above isl-max, 131072"),
        ("chat,duration=0.1", "rate × duration is 0.34 requests"),
        ("chat,rate=9000,duration=100000", "at most 5,000,000"),
        ("chat,rate=100,duration=40000,isl=100000", "4.0e+11 prompt tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_the_keys_name(word: str, told: str) -> None:
    with pytest.raises(BadGenerate) as caught:
        parse_generated(word)
    assert told in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "word", ["chat", "code,rate=20.5,isl-max=4096", "sin,seed=3,duration=60", "chat,cv=0.1,system=0"]
)
def test_a_trace_is_named_by_the_word_that_makes_it(word: str) -> None:
    assert str(parse_generated(word)) == word
    assert parse_generated(str(parse_generated(f"{word},think=60,start=0"))) == parse_generated(word)


def test_every_kind_says_something_of_each_number_without_a_default() -> None:
    """A kind that forgot one would fail only when somebody asks for it."""
    needed: dict[str, Any] = {n: f for n, f in GeneratorOptions.model_fields.items() if f.is_required()}
    for kind, numbers in KINDS.items():
        assert needed.keys() <= numbers.keys() <= GeneratorOptions.model_fields.keys(), kind
