// Time: one window for all charts, the marks above them, and a table of each.

import { html, useState, useEffect, useRef, useMemo, useLive, Panel } from "./ui.js";
import { live, on, ask, query } from "./live.js";
import { MarkDetails, markSign, now } from "./panels.js";
import { MISSING, plain, figure, clock, duration, name, zone } from "./words.js";

const uPlot = globalThis.uPlot;
const SPANS = [["1 min", 60], ["5 min", 300], ["1 h", 3600], ["6 h", 21600], ["1 day", 86400], ["1 week", 604800], ["1 month", 2592000]];
const SHORTEST_S = 60;
const LONGEST_S = 31 * 86400;
const AHEAD = 0.5; // of the window, on both sides: what a pan shows before the server answers
const ASK_MS = 120;
const AXIS_PX = 58;
const RIGHT_PX = 26;
const LIVE_MAX_S = 3600;
const TABLE_ROWS = 30;
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];

const CHARTS = [
  { id: "demand", title: "Demand and capacity", unit: "requests/s", wide: true, series: [["demand", "demand"], ["forecast_high", "forecast, high"], ["forecast_low", "forecast, low"], ["forecast", "forecast"], ["capacity", "capacity"], ["requests_per_s", "ended"]], band: [2, 3] },
  { id: "fleet", title: "Workers", unit: "workers", steps: true, dynamic: true, series: [["gpus_used", "GPUs used"]] },
  { id: "ttft", title: "TTFT", unit: "ms", target: "ttft_ms", series: [["ttft_p50", "p50"], ["ttft_p90", "p90"], ["ttft_p99", "p99"]] },
  { id: "itl", title: "ITL", unit: "ms", target: "itl_ms", series: [["itl_p50", "p50"], ["itl_p90", "p90"], ["itl_p99", "p99"]] },
  { id: "queue", title: "Queue", unit: "requests", series: [["waiting", "waiting"], ["running", "running"]] },
  { id: "kv", title: "KV cache", unit: "%", share: true, series: [["kv_use", "use"], ["kv_hit_rate", "hit rate"]] },
  { id: "tokens", title: "Tokens", unit: "tokens/s", series: [["tokens_per_s", "tokens/s"]] },
  { id: "kept", title: "Targets kept", unit: "%", share: true, series: [["kept", "kept"]] },
];

/** The window, the columns that are here, and who draws them. */
class Timeline {
  constructor() {
    this.span = 300;
    this.to = now();
    this.follow = true;
    this.data = { t: [] };
    this.gaps = [];
    this.marks = null;
    this.step = 1;
    this.have = [0, 0];
    this.width = 600;
    this.plots = new Map();
    this.listeners = new Set();
    this.error = null;
    this.frame = 0;
    this.timer = 0;
    this.asked = 0;
    this.touched = -Infinity;
  }

  get from() { return this.to - this.span; }

  columns() {
    const found = new Set();
    const points = live.points;
    for (const key of Object.keys(points.at(-1)?.v ?? {})) if (key.startsWith("workers_")) found.add(key);
    for (const worker of Object.values(live.state?.workers ?? {})) if (worker.component) found.add(`workers_${worker.component}`);
    for (const key of Object.keys(this.data)) if (key.startsWith("workers_")) found.add(key);
    return [...found].sort().slice(0, 8);
  }

  tell() { for (const listener of this.listeners) listener(); }

  look(to, span, follow) {
    const end = now();
    this.span = Math.min(LONGEST_S, Math.max(SHORTEST_S, span));
    this.follow = follow ?? to >= end - this.span * 0.001;
    this.to = this.follow ? end : Math.min(end + this.span * 0.25, to);
    this.draw();
    this.want();
  }

  pan(seconds) { this.touched = performance.now(); this.look(this.to + seconds, this.span, this.follow && seconds >= 0 ? undefined : false); }

  zoom(factor, at = 0.5) {
    const middle = this.from + this.span * at;
    const span = Math.min(LONGEST_S, Math.max(SHORTEST_S, this.span * factor));
    this.look(this.follow ? now() : middle + span * (1 - at), span, this.follow);
  }

  /** Redraw the charts once in the next frame, however often it is asked for. */
  draw(dataToo = false) {
    this.dataToo ||= dataToo;
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      const all = this.dataToo;
      this.dataToo = false;
      for (const plot of this.plots.values()) plot.update(all);
      this.tell();
    });
  }

  /** Ask the server if the window's data is not here, or is too coarse. */
  want(delay = ASK_MS) {
    const step = this.span / this.width;
    const inside = this.have[0] <= this.from && this.have[1] >= Math.min(this.to, now() - Math.max(2, this.step * 1.5));
    const fine = this.haveSpan && this.haveSpan <= this.span * 1.05 && this.haveSpan >= this.span * 0.45;
    if (inside && fine && step) return;
    if (this.timer) return;
    this.timer = setTimeout(() => this.fetch(), delay);
  }

  async fetch() {
    if (this.asking) { this.timer = 0; this.again = true; return; }
    this.asking = true;
    this.timer = 0;
    const ahead = this.span * AHEAD;
    const [from, to, span] = [this.from - ahead, Math.min(now(), this.to + ahead), this.span];
    const columns = [...new Set([...CHARTS.flatMap((chart) => chart.series.map(([key]) => key)), ...this.columns()])];
    try {
      const [found, marks] = await Promise.all([
        ask(`api/history?${query({ from: from.toFixed(3), to: to.toFixed(3), points: Math.round(this.width * (1 + 2 * AHEAD)), columns: columns.join(",") })}`),
        ask(`api/marks?${query({ from: from.toFixed(3), to: to.toFixed(3) })}`),
      ]);
      this.data = found.columns ?? { t: [] };
      this.step = found.step_s ?? 1;
      this.gaps = found.gaps ?? [];
      this.marks = marks.marks ?? marks;
      this.have = [from, to];
      this.haveSpan = span;
      this.error = null;
      this.merge();
    } catch (error) {
      this.error = plain(error.message, 200);
    }
    this.asking = false;
    if (this.again) { this.again = false; this.want(0); }
    this.draw(true);
  }

  /** Points of the stream that are newer than the server's answer. */
  merge() {
    const { t } = this.data;
    if (this.step > 2) return;
    const last = t.at(-1) ?? -Infinity;
    for (const point of live.points) if (point.t > last) this.append(point);
  }

  append(point) {
    const { t } = this.data;
    if (t.length && point.t <= t.at(-1)) return;
    for (const key of Object.keys(point.v)) if (key.startsWith("workers_") && !this.data[key]) this.data[key] = t.map(() => null);
    t.push(point.t);
    for (const key of Object.keys(this.data)) if (key !== "t") this.data[key].push(point.v[key] ?? null);
    this.have[1] = Math.max(this.have[1], point.t);
  }

  point() {
    const last = live.points.at(-1);
    if (!last) return;
    if (this.step <= 2) for (const point of live.points.slice(-10)) this.append(point);
    if (!this.follow) return;
    this.to = now();
    if (this.span <= LIVE_MAX_S || !this.moved || this.to - this.moved >= Math.max(10, this.step)) {
      this.moved = this.to;
      this.draw(true);
      this.want(0);
    }
  }

  shownMarks() {
    const seen = new Set();
    return [...(this.marks ?? []), ...live.marks].filter((mark) => {
      const key = `${mark.t} ${mark.kind} ${mark.worker} ${mark.title}`;
      if (mark.t < this.from || mark.t > this.to || seen.has(key)) return false;
      seen.add(key);
      return true;
    }).sort((one, other) => one.t - other.t);
  }
}

/** Columns of one chart as uPlot takes them: a row of nulls wherever time is missing, so that a gap is a gap. */
function rows(timeline, keys, factor, target) {
  const { t } = timeline.data;
  const limit = Math.max(3, timeline.step * 2.6);
  const times = [];
  const columns = keys.map(() => []);
  const sources = keys.map((key) => timeline.data[key]);
  for (let at = 0; at < t.length; at += 1) {
    if (at && t[at] - t[at - 1] > limit) {
      times.push((t[at] + t[at - 1]) / 2);
      for (const column of columns) column.push(null);
    }
    times.push(t[at]);
    for (let each = 0; each < keys.length; each += 1) {
      const value = sources[each]?.[at];
      columns[each].push(typeof value === "number" ? value * factor : null);
    }
  }
  if (target !== undefined) columns.push(times.map(() => target));
  return [times, ...columns];
}

const colours = () => {
  const style = getComputedStyle(document.documentElement);
  const read = (key) => style.getPropertyValue(key).trim();
  return { series: [1, 2, 3, 4, 5, 6, 7, 8].map((each) => read(`--series-${each}`)), grid: read("--grid"), text: read("--text-2"), bad: read("--bad"), gap: read("--gap"), band: read("--band"), mark: read("--mark") };
};

class Plot {
  constructor(timeline, chart, box, values) {
    Object.assign(this, { timeline, chart, box, values });
    this.seen = true;
    this.theme = matchMedia("(prefers-color-scheme: dark)");
    this.rebuild = () => this.build();
    this.theme.addEventListener("change", this.rebuild);
    this.sizes = new ResizeObserver(() => this.size());
    this.sizes.observe(box);
    this.views = new IntersectionObserver((entries) => {
      const { isIntersecting } = entries.at(-1);
      if (isIntersecting && !this.seen) { this.seen = true; this.update(true); }
      this.seen = isIntersecting;
    }, { rootMargin: "80px" });
    this.views.observe(box);
    this.build();
  }

  end() {
    this.theme.removeEventListener("change", this.rebuild);
    this.sizes.disconnect();
    this.views.disconnect();
    this.plot?.destroy();
  }

  keys() {
    return this.chart.dynamic ? [...this.timeline.columns(), ...this.chart.series.map(([key]) => key)] : this.chart.series.map(([key]) => key);
  }

  size() {
    const { clientWidth: width, clientHeight: height } = this.box;
    if (width && this.plot && (this.plot.width !== width || this.plot.height !== height)) this.plot.setSize({ width, height });
    if (width && this.chart.wide) this.timeline.width = Math.max(200, width - AXIS_PX - RIGHT_PX);
  }

  build() {
    this.plot?.destroy();
    const { chart, timeline } = this;
    const colour = colours();
    const target = chart.target ? live.state?.targets?.[chart.target] : undefined;
    this.target = typeof target === "number" ? target : undefined;
    this.shown = this.keys();
    this.names = this.shown.join();
    const series = this.shown.map((key, at) => ({
      stroke: colour.series[at % 8], width: chart.band?.includes(at + 1) ? 0.8 : 1.6, dash: DASHES[at % 4], points: { show: false },
      paths: chart.steps ? uPlot.paths.stepped({ align: 1 }) : undefined,
    }));
    if (this.target !== undefined) series.push({ stroke: colour.bad, width: 1, dash: [4, 4], points: { show: false } });
    const axis = { stroke: colour.text, grid: { stroke: colour.grid, width: 1 }, ticks: { stroke: colour.grid, width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
    const formats = { short: new Intl.DateTimeFormat(undefined, { timeStyle: "short" }), medium: new Intl.DateTimeFormat(undefined, { timeStyle: "medium" }), day: new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" }) };
    const ticks = (plot, splits) => splits.map((at, index) => {
      const then = new Date(at * 1000);
      const step = splits.length > 1 ? splits[1] - splits[0] : 60;
      if (step >= 86400) return formats.day.format(then);
      const before = index ? new Date(splits[index - 1] * 1000) : null;
      const text = (step < 60 ? formats.medium : formats.short).format(then);
      return before && before.getDate() !== then.getDate() ? `${formats.day.format(then)}` : text;
    });
    const options = {
      width: this.box.clientWidth || 300, height: this.box.clientHeight || 150,
      padding: [8, RIGHT_PX, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "time", setSeries: false }, drag: { setScale: false, x: false, y: false }, points: { size: 6 } },
      select: { show: false },
      scales: { x: { time: true, auto: false, min: timeline.from, max: timeline.to }, y: { range: (plot, low, high) => [0, chart.share ? 100 : Math.max(high || 1, this.target ?? 0, chart.steps ? 1 : 0) * 1.08] } },
      axes: [
        { ...axis, size: 26, space: 70, values: ticks },
        { ...axis, size: AXIS_PX, space: 28, values: (plot, splits) => splits.map((value) => figure(value)) },
      ],
      series: [{}, ...series],
      bands: chart.band ? [{ series: chart.band, fill: colour.band }] : [],
      hooks: {
        drawClear: [(plot) => this.under(plot, colour)],
        setCursor: [(plot) => this.readout(plot)],
      },
    };
    this.plot = new uPlot(options, this.rows(), this.box);
    this.plot.series.forEach((each) => Object.assign(each, { fullDash: each.dash, fullWidth: each.width }));
    this.light = false;
    this.readout(this.plot);
  }

  rows() { return rows(this.timeline, this.shown, this.chart.share ? 100 : 1, this.target); }

  update(dataToo) {
    // While a person pans, charts that nobody sees wait.
    if (!this.seen && performance.now() - this.timeline.touched < 400) { this.stale = true; return; }
    const wanted = this.chart.target ? live.state?.targets?.[this.chart.target] : undefined;
    if (this.keys().join() !== this.names || (typeof wanted === "number" ? wanted : undefined) !== this.target) { this.build(); return; }
    this.lighten(performance.now() - this.timeline.touched < 250);
    this.plot.batch(() => {
      if (dataToo || this.stale) this.plot.setData(this.rows(), false);
      this.plot.setScale("x", { min: this.timeline.from, max: this.timeline.to });
    });
    this.stale = false;
    this.readout(this.plot);
  }

  /** Dashes and bands are most of a frame's cost without a GPU: a chart that moves is drawn with plain lines. */
  lighten(moving) {
    if (moving === this.light) return;
    this.light = moving;
    this.plot.series.forEach((each, at) => {
      each.dash = moving ? [] : each.fullDash;
      each.width = moving ? 1 : each.fullWidth;
    });
  }

  /** Gaps and marks, under the lines. */
  under(plot, colour) {
    const { ctx, bbox } = plot;
    ctx.save();
    const [from, to] = [this.timeline.from, this.timeline.to];
    const at = (seconds) => bbox.left + ((seconds - from) / (to - from)) * bbox.width;
    ctx.fillStyle = colour.gap;
    for (const gap of [...this.timeline.gaps, ...live.gaps]) {
      const [left, right] = [Math.max(bbox.left, at(gap.from)), Math.min(bbox.left + bbox.width, at(gap.to ?? now()))];
      if (right > left) ctx.fillRect(left, bbox.top, Math.max(1, right - left), bbox.height);
    }
    ctx.strokeStyle = colour.mark;
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    for (const mark of this.timeline.lane ?? []) {
      const left = Math.round(at(mark.t));
      if (left < bbox.left || left > bbox.left + bbox.width) continue;
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
    }
    ctx.stroke();
    ctx.restore();
  }

  /** The values at the cursor, or the newest that are known, beside the names. */
  readout(plot) {
    const { idx } = plot.cursor;
    const data = plot.data;
    this.shown.forEach((key, each) => {
      const column = data[each + 1];
      if (!column) return;
      let at = idx ?? column.length - 1;
      if (idx === null || idx === undefined) while (at > 0 && data[0][at] > this.timeline.to) at -= 1;
      this.values[key] = column[at];
    });
    if (this.legend) {
      for (const box of this.legend.querySelectorAll("[data-key]")) box.textContent = figure(this.values[box.dataset.key]);
      const when = this.legend.querySelector("[data-when]");
      if (when) when.textContent = idx === null || idx === undefined ? "" : clock(data[0][idx]);
    }
  }
}

const labelOf = (chart, key) => chart.series.find(([each]) => each === key)?.[1] ?? name(key.replace(/^workers_/, ""));

function Table({ timeline, chart, keys }) {
  const [, again] = useState(0);
  useEffect(() => {
    const listener = () => again((count) => count + 1);
    timeline.listeners.add(listener);
    return () => timeline.listeners.delete(listener);
  }, []);
  const [times, ...columns] = rows(timeline, keys, chart.share ? 100 : 1);
  const inside = times.map((at, index) => [at, index]).filter(([at]) => at >= timeline.from && at <= timeline.to);
  const step = Math.max(1, Math.ceil(inside.length / TABLE_ROWS));
  const chosen = inside.filter(([, row], index) => index % step === 0 || index === inside.length - 1 || columns.every((column) => column[row] === null)).slice(-4 * TABLE_ROWS).reverse();
  return html`<div class="scroll table-view" tabindex="0" role="region" aria-label=${`${chart.title} as a table`}><table>
    <caption>${chart.title}, ${chart.unit}; each ${step === 1 ? "" : `${step}th `}point of ${duration(timeline.step)}</caption>
    <thead><tr><th scope="col">Time</th>${keys.map((key) => html`<th scope="col">${labelOf(chart, key)}</th>`)}</tr></thead>
    <tbody>${chosen.map(([at, index]) => html`<tr><th scope="row">${clock(at)}</th>${columns.map((column) => html`<td>${figure(column[index])}</td>`)}</tr>`)}</tbody></table></div>`;
}

function Chart({ timeline, chart }) {
  const box = useRef(null);
  const legend = useRef(null);
  const plot = useRef(null);
  const [asTable, setAsTable] = useState(false);
  const [names, setNames] = useState("");
  useEffect(() => {
    const made = new Plot(timeline, chart, box.current, {});
    plot.current = made;
    timeline.plots.set(chart.id, made);
    const listener = () => setNames(`${made.names} ${made.target ?? ""}`);
    listener();
    timeline.listeners.add(listener);
    const ends = gestures(timeline, box.current);
    return () => { ends(); timeline.listeners.delete(listener); timeline.plots.delete(chart.id); made.end(); };
  }, []);
  useEffect(() => { plot.current.legend = legend.current; plot.current.readout(plot.current.plot); });
  const keys = names ? names.split(" ")[0].split(",") : [];
  return html`<figure class=${chart.wide ? "chart wide" : "chart"} aria-labelledby=${`chart-${chart.id}`}>
    <figcaption><h3 id=${`chart-${chart.id}`}>${chart.title} <span class="quiet">${chart.unit}</span></h3>
      <button aria-pressed=${asTable} onClick=${() => setAsTable(!asTable)} aria-label=${`${chart.title} as a table`}>Table</button></figcaption>
    <div class="legend" ref=${legend}>${keys.map((key, at) => html`<span key=${key}><svg class=${`swatch s${(at % 8) + 1}`} width="22" height="8" aria-hidden="true"><line x1="0" y1="4" x2="22" y2="4" stroke-dasharray=${DASHES[at % 4].join(" ")} /></svg>${labelOf(chart, key)} <b data-key=${key}>${MISSING}</b></span>`)}
      ${chart.target && plot.current?.target !== undefined && html`<span><svg class="swatch target" width="22" height="8" aria-hidden="true"><line x1="0" y1="4" x2="22" y2="4" stroke-dasharray="4 4" /></svg>target <b>${figure(plot.current.target)}</b></span>`}
      <span class="quiet" data-when></span></div>
    <div class=${asTable ? "plot hidden" : "plot"} ref=${box} tabindex=${asTable ? -1 : 0} role="img"
      aria-label=${`${chart.title} over time. Arrow keys pan, plus and minus zoom, End goes to now. The button Table shows the numbers.`}></div>
    ${asTable && html`<${Table} timeline=${timeline} chart=${chart} keys=${keys} />`}
  </figure>`;
}

/** Drag to pan, wheel with Ctrl or Shift to zoom or pan, two fingers to zoom, keys for all. */
function gestures(timeline, box) {
  const pointers = new Map();
  const plotWidth = () => Math.max(50, box.clientWidth - AXIS_PX - RIGHT_PX);
  const down = (event) => {
    if (event.button !== 0) return;
    pointers.set(event.pointerId, event.clientX);
    box.setPointerCapture(event.pointerId);
  };
  const move = (event) => {
    if (!pointers.has(event.pointerId)) return;
    const before = pointers.get(event.pointerId);
    if (pointers.size === 1) timeline.pan(((before - event.clientX) / plotWidth()) * timeline.span);
    else {
      const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
      const [old, next] = [Math.max(20, Math.abs(before - other)), Math.max(20, Math.abs(event.clientX - other))];
      timeline.zoom(old / next);
    }
    pointers.set(event.pointerId, event.clientX);
  };
  const up = (event) => pointers.delete(event.pointerId);
  const wheel = (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const at = (event.clientX - box.getBoundingClientRect().left - AXIS_PX) / plotWidth();
      timeline.zoom(Math.exp(Math.max(-50, Math.min(50, event.deltaY)) / 120), Math.min(1, Math.max(0, at)));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      timeline.pan(((event.deltaX || event.deltaY) / plotWidth()) * timeline.span);
    }
  };
  const key = (event) => {
    const { key: pressed } = event;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (pressed === "ArrowLeft") timeline.pan(-timeline.span * 0.1);
    else if (pressed === "ArrowRight") timeline.pan(timeline.span * 0.1);
    else if (pressed === "PageUp") timeline.pan(-timeline.span);
    else if (pressed === "PageDown") timeline.pan(timeline.span);
    else if (pressed === "+" || pressed === "=") timeline.zoom(0.5);
    else if (pressed === "-") timeline.zoom(2);
    else if (pressed === "End") timeline.look(now(), timeline.span, true);
    else return;
    event.preventDefault();
  };
  const all = { pointerdown: down, pointermove: move, pointerup: up, pointercancel: up, keydown: key };
  for (const [kind, listener] of Object.entries(all)) box.addEventListener(kind, listener);
  box.addEventListener("wheel", wheel, { passive: false });
  return () => {
    for (const [kind, listener] of Object.entries(all)) box.removeEventListener(kind, listener);
    box.removeEventListener("wheel", wheel);
  };
}

/** Marks that are closer than a finger stand together. */
function grouped(timeline) {
  const near = (timeline.span * 22) / timeline.width;
  const groups = [];
  for (const mark of timeline.shownMarks()) {
    const last = groups.at(-1);
    if (last && mark.t - last.t < near) last.marks.push(mark);
    else groups.push({ t: mark.t, marks: [mark] });
  }
  return groups;
}

const ROUGH = ["bad", "warn", "plan", "busy", "good", "idle"];

function Marks({ timeline, groups }) {
  const [hovered, setHovered] = useState(null);
  const [pinned, setPinned] = useState(null);
  const open = hovered ?? pinned;
  const shown = open === null ? null : groups.reduce((best, group) => (!best || Math.abs(group.t - open) < Math.abs(best.t - open) ? group : best), null);
  const step = (event, at) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") { setPinned(null); setHovered(null); }
    if (!move) return;
    event.preventDefault();
    event.currentTarget.parentElement.querySelectorAll("button")[at + move]?.focus();
  };
  return html`<div class="marks">
    <div class="lane" role="group" aria-label=${`${groups.length} marks of actions. Arrow keys go from one to the next.`}>
      ${groups.map((group, at) => {
        const all = group.marks.map(markSign);
        const most = all.reduce((one, other) => (ROUGH.indexOf(other.kind) < ROUGH.indexOf(one.kind) ? other : one));
        const words = `${clock(group.t)}: ${group.marks.slice(0, 3).map((mark) => plain(mark.title, 100)).join("; ")}${group.marks.length > 3 ? `; and ${group.marks.length - 3} more` : ""}`;
        return html`<button key=${group.t} class=${`mark ${most.kind}`} aria-label=${words} aria-pressed=${pinned === group.t}
          style=${{ left: `${(100 * (group.t - timeline.from)) / timeline.span}%` }}
          onMouseEnter=${() => setHovered(group.t)} onMouseLeave=${() => setHovered(null)} onFocus=${() => setHovered(group.t)} onBlur=${() => setHovered(null)}
          onKeyDown=${(event) => step(event, at)} onClick=${() => setPinned(pinned === group.t ? null : group.t)}>${group.marks.length > 1 ? group.marks.length : most.sign}</button>`;
      })}
    </div>
    <div class="mark-box" tabindex="0" role="region" aria-label="Details of the mark">${shown ? shown.marks.slice(0, 12).map((mark) => html`<${MarkDetails} mark=${mark} />`)
      : html`<p class="quiet">${groups.length ? "Point at a mark, or focus it: the rule, its numbers, and what would have changed it. A click keeps it." : "Nothing happened in this window."}</p>`}</div>
  </div>`;
}

export function Time() {
  const kept = useRef(null);
  const timeline = (kept.current ??= new Timeline());
  const [, again] = useState(0);
  useLive("mark");
  useEffect(() => {
    const listener = () => again((count) => count + 1);
    timeline.listeners.add(listener);
    const ends = [on("point", () => timeline.point()), on("gap", () => timeline.draw()), on("state", () => { if (timeline.targets !== JSON.stringify(live.state?.targets)) { timeline.targets = JSON.stringify(live.state?.targets); timeline.draw(); } })];
    timeline.look(now(), timeline.span, true);
    return () => { timeline.listeners.delete(listener); ends.forEach((end) => end()); };
  }, []);
  // The same tree each time: a chart draws itself, so that a frame of a pan costs no diff of eight charts.
  const charts = useMemo(() => html`<div class="charts">${CHARTS.map((chart) => html`<${Chart} key=${chart.id} timeline=${timeline} chart=${chart} />`)}</div>`, []);
  const groups = grouped(timeline);
  timeline.lane = groups;
  const gone = [...timeline.gaps, ...live.gaps].filter((gap, at, all) => all.findIndex((each) => each.from === gap.from) === at && (gap.to ?? Infinity) > timeline.from && gap.from < timeline.to);
  return html`<${Panel} id="time" title="Time" wide aside=${html`<div class="tabs" role="group" aria-label="Window">
      ${SPANS.map(([word, span]) => html`<button aria-pressed=${Math.abs(timeline.span - span) < 1} onClick=${() => timeline.look(timeline.follow ? now() : timeline.to, span, timeline.follow)}>${word}</button>`)}
      <button aria-label="Earlier" onClick=${() => timeline.pan(-timeline.span / 2)}>◀</button>
      <button aria-label="Later" onClick=${() => timeline.pan(timeline.span / 2)}>▶</button>
      <button aria-label="Zoom in" onClick=${() => timeline.zoom(0.5)}>+</button>
      <button aria-label="Zoom out" onClick=${() => timeline.zoom(2)}>−</button>
      <button aria-pressed=${timeline.follow} onClick=${() => timeline.look(now(), timeline.span, true)}>Now</button></div>`}>
    <p class="quiet window">${clock(timeline.from)} – ${timeline.follow ? "now" : clock(timeline.to)} · ${duration(timeline.span)} · a point is ${duration(timeline.step)} · ${zone()}
      ${gone.length > 0 && html` · <span class="warn">${gone.length === 1 ? "one gap" : `${gone.length} gaps`}: ${plain(gone.at(-1).why, 120)}</span>`}
      ${timeline.error && html` · <span class="bad" role="alert">history: ${timeline.error}</span>`}</p>
    <${Marks} timeline=${timeline} groups=${groups} />
    ${charts}
  <//>`;
}
