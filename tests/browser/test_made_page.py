"""Each panel, hostile text, widths, keys and the stream, over made state."""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.dashboard.app import load_assets
from tests.browser.made import MadeServer, made_state, mark, request

BYTES_MAX = 90_000
EVENT_MS_MAX = 500
PAINT_MS_MAX = 1_000
OTHERS = ((360, "light"), (1280, "dark"), (2560, "light"), (2560, "dark"))

BREAK_OUT = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>\'"</td>'
ESCAPED = "\x1b[31mred\x1b[0m\x1b]0;title\x07\u202egnp.exe\u0000"

CONTENT = """() => [document.documentElement.scrollWidth, innerWidth]"""

PAN = """async (ms) => {
  const plot = document.querySelector('.chart.wide .plot');
  const box = plot.getBoundingClientRect();
  plot.setPointerCapture = () => {};
  let x = box.left + 200;
  const send = (kind) => {
    const at = { bubbles: true, pointerId: 1, button: 0, clientX: x, clientY: box.top + 40 };
    plot.dispatchEvent(new PointerEvent(kind, at));
  };
  send('pointerdown');
  const frames = [], end = performance.now() + ms;
  await new Promise((done) => {
    const frame = (now) => {
      frames.push(now);
      x += 3;
      send('pointermove');
      requestAnimationFrame((next) => (performance.now() < end ? frame(next) : done()));
    };
    requestAnimationFrame(frame);
  });
  send('pointerup');
  const gaps = frames.slice(1).map((at, index) => at - frames[index]).sort((one, other) => one - other);
  const per_s = (1000 * gaps.length) / (frames.at(-1) - frames[0]);
  return { frames: frames.length, per_s, p50_ms: gaps[gaps.length >> 1] };
}"""

SEEN = """(text) => new Promise((done) => {
  const look = () => {
    if (!document.querySelector('.verdict')?.textContent.includes(text)) return;
    watch.disconnect();
    done(Date.now());
  };
  const watch = new MutationObserver(look);
  watch.observe(document.body, { subtree: true, childList: true, characterData: true });
  look();
})"""
HIDE = """(hidden) => {
  Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
  document.dispatchEvent(new Event('visibilitychange'));
}"""


def text_of(page: Any, selector: str) -> str:
    return str(page.locator(selector).first.inner_text())


def test_the_whole_page_has_at_most_90_kb_compressed() -> None:
    shipped = {name: asset for name, asset in load_assets().items() if not name.endswith((".LICENSE", ".json"))}
    assert sum(len(gzip.compress(asset.body, 9)) for asset in shipped.values()) < BYTES_MAX


def test_the_code_leaves_the_address_and_nothing_is_loaded_from_elsewhere(made: MadeServer, open_page: Any) -> None:
    page = open_page("about:blank")
    asked: list[str] = []
    page.on("request", lambda each: asked.append(each.url))
    link = made.link()
    page.goto(link)
    page.wait_for_selector(".gpu")
    assert "#" not in page.url
    assert all(url.startswith(f"http://127.0.0.1:{made.port}/") for url in asked)
    assert not any(link.partition("#code=")[2] in url for url in asked)


def test_without_a_session_the_page_says_how_to_get_one(made: MadeServer, open_page: Any) -> None:
    page = open_page(made.link().partition("#")[0])
    page.wait_for_selector("text=This page needs a session")
    assert "dynamo dashboard --open" in text_of(page, "main")


def test_the_panels_show_what_there_is(made: MadeServer, open_page: Any) -> None:
    page = open_page(made.link())
    page.wait_for_selector(".gpu")
    assert "crashed 2 minutes ago" in text_of(page, ".verdict")
    assert "96.1 %" in text_of(page, ".figures")
    assert text_of(page, ".figures div:nth-child(3) dd") == "–"
    assert page.locator(".gpu").count() == 8
    assert "drains, at most 42 s left" in text_of(page, ".gpu:nth-child(3)")
    assert "stranger python train.py (pid 4711), 31 GiB" in text_of(page, ".gpu:nth-child(5)")
    assert "– busy" in text_of(page, ".gpu:nth-child(6)")
    assert "CUDA out of memory" in text_of(page, ".last-words")
    assert "No GPU is free: a stranger (pid 4711) holds GPU 4." in text_of(page, "#actions")
    assert page.locator(".chart").count() == 8


def test_models_that_share_the_gpus_are_shown_with_what_is_held(made: MadeServer, open_page: Any) -> None:
    page = open_page(made.link())
    page.wait_for_selector(".gpu")
    assert page.locator("#models").count() == 0
    row = {"component": "qwen", "gpus_per_worker": 2, "ready": 0, "target": 1, "asleep": 1, "held": 0, "held_s": 0.0}
    names = [("Qwen/Qwen3-8B", {"held": 3, "held_s": 4.2, "why": "gets 1 more: 3 held for 4.2 s"}), (BREAK_OUT, {})]
    rows = [{**row, "component": str(n), "model": name, "why": None, **more} for n, (name, more) in enumerate(names)]
    made.change(lambda state: state.update(models=rows))
    first = page.locator("table.models tbody tr").first
    first.get_by_text("3, the oldest for 4.2 s").wait_for()
    assert "Qwen/Qwen3-8B" in first.inner_text()
    assert "gets 1 more" in first.inner_text()
    assert page.evaluate("window.broken") is None


def test_a_mark_says_its_rule_and_what_would_have_changed_it(made: MadeServer, open_page: Any) -> None:
    page = open_page(made.link())
    mark_of = page.get_by_role("button", name="VllmWorker +1 (scale up)").first
    mark_of.focus()
    details = page.locator(".mark-box")
    details.get_by_text("scale_up: forecast above capacity").wait_for()
    assert "a forecast below 12.0 requests/s" in details.inner_text()


def test_an_event_is_on_the_page_within_half_a_second(made: MadeServer, open_page: Any) -> None:
    page = open_page(made.link())
    page.wait_for_selector(".connection.live")
    waits = []
    for number in range(5):
        page.evaluate(f"window.seen = ({SEEN})('news {number}'); 0")
        began_s = time.time()
        made.change(lambda state, number=number: state["verdict"].update(text=f"news {number}"))
        waits.append(page.evaluate("window.seen") - 1_000 * began_s)
    print("event on the page after ms:", [round(each) for each in waits])
    assert sorted(waits)[2] < EVENT_MS_MAX


@pytest.mark.timing
def test_the_first_paint_comes_within_a_second(made: MadeServer, open_page: Any) -> None:
    page = open_page(made.link())
    page.wait_for_selector(".gpu")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    print("first contentful paint after ms:", round(paint))
    assert paint < PAINT_MS_MAX


def test_panning_a_day_keeps_what_is_shown_and_asks_for_what_comes(made: MadeServer, open_page: Any) -> None:
    """Frames are reported: without a GPU, and beside other tests, they say more of the machine than of the page."""
    page = open_page(made.link())
    page.wait_for_selector(".gpu")
    page.get_by_role("button", name="1 day").click()
    page.wait_for_selector(".window:has-text('a point is 5'), .window:has-text('a point is 1 min')")
    calls = made.collector.reader.calls
    seen = page.evaluate(PAN, 3_000)
    print("panning a day:", seen)
    assert seen["frames"] > 10
    assert "now" not in text_of(page, ".window")
    page.get_by_role("button", name="Earlier").click()
    page.get_by_role("button", name="Earlier").click()
    page.get_by_role("button", name="Earlier").click()
    wait_until(lambda: made.collector.reader.calls > calls)


def test_a_missing_time_is_a_gap(made: MadeServer, open_page: Any) -> None:
    now_s = time.time()
    made.collector.reader.gap = (now_s - 200, now_s - 100)
    page = open_page(made.link())
    page.get_by_text("one gap: the arbiter was away").wait_for()
    page.get_by_role("button", name="Queue as a table").click()
    page.locator(".table-view td", has_text="–").first.wait_for()


def test_names_and_words_cannot_break_out(made: MadeServer, open_page: Any, tmp_path: Path) -> None:
    log_file = tmp_path / "worker.log"
    log_file.write_text(f"{BREAK_OUT}\n{ESCAPED}\n{'x' * 10_000_000}\nlast line\n")
    made.collector.log_file = log_file

    def hostile(state: dict[str, Any]) -> None:
        state["verdict"].update(text=BREAK_OUT, problems=[{"text": BREAK_OUT, "link": "javascript:window.broken=1"}])
        state["workers"][BREAK_OUT] = {
            **state["workers"]["dynamo_VllmWorker_2"],
            "component": ESCAPED,
            "last_words": BREAK_OUT + "y" * 100_000,
        }
        state["gpus"][0].update(
            model=BREAK_OUT, name=ESCAPED, strangers=[{"pid": BREAK_OUT, "name": ESCAPED, "bytes": "x"}]
        )
        state["planner"] = {BREAK_OUT: {"__proto__": BREAK_OUT}}

    made.change(hostile)
    made.collector.all_marks.append(
        mark(time.time() - 5, BREAK_OUT, BREAK_OUT, reason=ESCAPED, detail={BREAK_OUT: BREAK_OUT})
    )
    made.collector.requests.rows.append(request(BREAK_OUT, time.time(), BREAK_OUT, model=ESCAPED))
    page = open_page(made.link())
    page.wait_for_selector(".gpu")
    page.get_by_role("button", name="dynamo_PrefillWorker_1", exact=True).click()
    page.get_by_text("last line").wait_for()
    assert page.evaluate("window.broken") is None
    assert page.locator("img, #app script").count() == 0
    shown = page.locator("main").inner_text()
    assert "<img src=x" in shown
    assert not set("\x1b\u202e\x00\x07") & set(shown)
    assert page.locator("a[href^='javascript']").count() == 0
    assert len(shown) < 60_000


def test_a_lost_stream_comes_back_and_misses_nothing(made: MadeServer, open_page: Any) -> None:
    page = open_page(made.link())
    page.wait_for_selector(".connection.live")
    made.refuse_streams = True
    made.put("mark", mark(time.time(), "action", "cut"))
    page.wait_for_selector(".connection.lost")
    made.put("mark", mark(time.time(), "held", "said while it was away", reason="missed?"))
    made.refuse_streams = False
    page.wait_for_selector(".connection.live")
    page.locator("#actions").get_by_text("said while it was away").wait_for()


def test_a_silent_stream_is_replaced_by_questions(made: MadeServer, open_page: Any) -> None:
    made.holds_streams = True
    page = open_page(made.link())
    page.wait_for_selector(".connection.poll")
    page.wait_for_selector(".gpu")
    made.change(lambda state: state["verdict"].update(text="asked for"))
    page.locator(".verdict").get_by_text("asked for").wait_for()


def test_a_hidden_tab_holds_no_stream(made: MadeServer, open_page: Any) -> None:
    page = open_page(made.link())
    page.wait_for_selector(".connection.live")
    page.evaluate(HIDE, True)
    wait_until(lambda: made.streams == 0)
    made.change(lambda state: state["verdict"].update(text="while hidden"))
    page.evaluate(HIDE, False)
    page.locator(".verdict").get_by_text("while hidden").wait_for()


def test_a_read_only_page_has_no_acts(open_page: Any) -> None:
    with MadeServer(read_only=True) as made:
        page = open_page(made.link())
        page.wait_for_selector(".gpu")
        assert page.get_by_role("button", name="Act…").count() == 0
        assert page.locator("tr.component button").count() == 0
        assert page.locator("#whatif form").count() == 0
        assert text_of(page, ".badge") == "read-only"


def test_the_page_works_below_a_path(open_page: Any) -> None:
    with MadeServer(base="/gpu/box") as made:
        page = open_page(made.link())
        page.wait_for_selector(".connection.live")
        page.wait_for_selector(".gpu")


def test_an_act_by_keyboard_says_first_what_it_would_do_and_wants_the_name(made: MadeServer, open_page: Any) -> None:
    page = open_page(made.link())
    page.get_by_role("button", name="Act on dynamo_PrefillWorker_2").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    page.get_by_role("radio", name="Drain The worker finishes").focus()
    page.keyboard.press("Space")
    page.keyboard.press("Enter")
    now = page.get_by_role("button", name="Drain now")
    now.wait_for()
    assert made.collector.asked[-1][1]["would"] is True
    assert now.is_disabled()
    page.get_by_label("to confirm").focus()
    page.keyboard.type("dynamo_PrefillWorker_2")
    page.keyboard.press("Enter")
    page.get_by_text("Done.").wait_for()
    assert made.collector.asked[-1] == ("dynamo_drain", {"name": "dynamo_PrefillWorker_2", "force": False})
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Act on dynamo_PrefillWorker_2"


def test_a_refused_act_says_why(made: MadeServer, open_page: Any) -> None:
    page = open_page(made.link())
    page.get_by_role("button", name="Scale VllmWorker").click()
    page.get_by_label("Workers (such as").fill("3")
    page.get_by_role("button", name="Show what it would do").click()
    page.locator("dialog").get_by_text("dynamo_scale is refused here").wait_for()
    assert made.collector.asked[-1][1]["target"] == "=3"


def test_a_request_is_found_by_its_id_and_shown_as_a_waterfall(made: MadeServer, open_page: Any) -> None:
    page = open_page(made.link())
    page.get_by_role("button", name="failed", exact=True).click()
    page.locator(".request").get_by_text("worker lost").wait_for()
    page.get_by_label("Find by x-request-id").fill("req-007")
    page.keyboard.press("Enter")
    row = page.locator(".request", has_text="req-007")
    row.wait_for()
    wait_until(lambda: page.locator(".request").count() == 1)
    assert "prefill" in row.locator(".waterfall").get_attribute("aria-label")
    row.get_by_role("button").click()
    assert "hand-off of the KV cache" in row.inner_text()


def test_a_what_if_stands_beside_what_happened(made: MadeServer, open_page: Any) -> None:
    page = open_page(made.link())
    page.get_by_label("Policy").select_option("slo")
    page.get_by_label("TTFT target, ms").fill("250")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("columnheader", name="What happened").wait_for()
    assert "41.3" in text_of(page, ".whatif-result")
    assert made.whatifs.begun == {"hours": 1, "policy": "slo", "targets": {"ttft_ms": 250}, "fleet": None}
    page.get_by_label("Policy").select_option("sla")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.locator(".whatif-result").get_by_text("Cancelled.").wait_for()


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (360, "dark"),
        (1280, "light"),
        *(pytest.param(*each, marks=pytest.mark.full) for each in OTHERS),
    ],
)
def test_the_page_fits_and_has_no_serious_accessibility_violation(
    made: MadeServer, open_page: Any, pictures: Path, width: int, scheme: str
) -> None:
    page = open_page(made.link(), width=width, color_scheme=scheme, bypass_csp=True, reduced_motion="reduce")
    page.wait_for_selector(".gpu")
    page.get_by_role("button", name="TTFT as a table").click()
    page.wait_for_selector(".table-view")
    inside, whole = page.evaluate(CONTENT)
    assert inside <= whole
    page.screenshot(path=str(pictures / f"page-{width}-{scheme}.png"), full_page=True)
    axe = os.environ.get("DYN_AXE")
    if axe is None:
        pytest.skip("DYN_AXE names no axe.js: `tox -e browser` fetches it")
    page.add_script_tag(path=axe)
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    serious = [
        f"{each['id']}: {each['nodes'][0]['html'][:200]} {each['nodes'][0]['failureSummary']}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_made_state_has_the_contract_s_keys() -> None:
    assert {"verdict", "arbiter", "targets", "planner", "gpus", "workers"} <= set(made_state())


def wait_until(true: Any, timeout_s: float = 15.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.02)
