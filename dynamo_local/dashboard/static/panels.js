// What is: the verdict, the GPUs, the workers with their logs, and the list of actions with reasons.

import { html, useLive, useState, useEvery, useRef, useEffect, Panel, State, Bar } from "./ui.js";
import { live, ask, query } from "./live.js";
import { MISSING, plain, name, number, figure, share, bytes, duration, clock, facts } from "./words.js";

const LINES_MAX = 400;
const LINE_MAX = 1000;

const CONNECTION = {
  connecting: ["◐", "connecting"],
  live: ["●", "live"],
  poll: ["◑", "asks every 2 s (the stream is silent)"],
  paused: ["‖", "paused while hidden"],
  lost: ["✕", "connection lost, trying again"],
  refused: ["✕", "session ended: run dynamo dashboard --open"],
};

export function Connection() {
  useLive("connection");
  const [sign, words] = CONNECTION[live.connection];
  return html`<span class=${`connection ${live.connection}`} role="status"><span aria-hidden="true">${sign}</span> ${words}</span>`;
}

function Problem({ problem }) {
  // The link is a place on this page, and nothing else.
  const link = typeof problem.link === "string" && /^#[\w.=-]{1,200}$/.test(problem.link) ? problem.link : null;
  const text = plain(problem.text, 300);
  return html`<li>${link ? html`<a href=${link}>${text}</a>` : text}</li>`;
}

export function Verdict() {
  useLive("state");
  const verdict = live.state?.verdict;
  if (!verdict) return html`<section class="verdict-box" aria-label="Verdict"><p class="verdict">Waiting for the first answer…</p></section>`;
  const sign = verdict.ok === true ? "✓" : verdict.ok === false ? "!" : "?";
  const kind = verdict.ok === true ? "good" : verdict.ok === false ? "bad" : "unknown";
  const kept = verdict.kept ?? {};
  const hours = verdict.gpu_hours ?? {};
  return html`<section class=${`verdict-box ${kind}`} aria-label="Verdict">
    <div aria-live="polite" aria-atomic="true">
      <p class="verdict"><span class="sign" aria-hidden="true">${sign}</span>
        <span class="sr">${verdict.ok === true ? "Well: " : verdict.ok === false ? "Not well: " : ""}</span>${plain(verdict.text, 400)}</p>
      ${verdict.problems?.length > 0 && html`<ul class="problems">${verdict.problems.slice(0, 8).map((problem) => html`<${Problem} problem=${problem} />`)}</ul>`}
    </div>
    <dl class="figures">
      ${[["minute", "Kept, last minute"], ["hour", "last hour"], ["day", "last day"]].map(
        ([key, label]) => html`<div><dt>${label}</dt><dd>${share(kept[key], 1)}</dd></div>`)}
      <div><dt>GPU-hours used</dt><dd>${figure(hours.used)}</dd></div>
      <div><dt>Fixed fleet needs</dt><dd>${figure(hours.fixed)}</dd></div>
      <div><dt>Used ÷ fixed</dt><dd>${share(hours.ratio)}</dd></div>
    </dl>
  </section>`;
}

function Gpu({ gpu }) {
  const held = gpu.worker ? name(gpu.worker) : null;
  const memory = gpu.used ?? gpu.allocated;
  const part = typeof memory === "number" && gpu.total ? memory / gpu.total : null;
  const strangers = gpu.strangers ?? [];
  return html`<li class="gpu">
    <div class="gpu-head"><b>GPU ${gpu.index ?? MISSING}</b><span class="quiet clip" title=${name(gpu.name)}>${name(gpu.name)}</span></div>
    <div class="gpu-who"><${State} value=${name(gpu.state ?? (held ? "in use" : "free"))} /></div>
    ${held && html`<div class="break">${held}</div>`}
    <div class="quiet break">${gpu.role ? name(gpu.role) : ""}${gpu.role && gpu.model ? " · " : ""}${gpu.model ? name(gpu.model) : ""}</div>
    <${Bar} value=${part} label="Memory" text=${`${bytes(memory)} of ${bytes(gpu.total)}`} />
    <${Bar} value=${gpu.utilisation} label="Utilisation" text=${`${share(gpu.utilisation)} busy`} />
    ${typeof gpu.allocated === "number" && gpu.used !== gpu.allocated && html`<div class="quiet">allocated ${bytes(gpu.allocated)}</div>`}
    ${typeof gpu.drain_left_s === "number" && html`<div class="warn">drains, at most ${duration(gpu.drain_left_s)} left</div>`}
    ${strangers.slice(0, 4).map((each) => html`<div class="warn clip" title=${name(each.name)}>stranger ${name(each.name)} (pid ${plain(each.pid, 12)}), ${bytes(each.bytes)}</div>`)}
    ${strangers.length > 4 && html`<div class="warn">and ${strangers.length - 4} more</div>`}
  </li>`;
}

export function Gpus() {
  useLive("state");
  const gpus = live.state?.gpus ?? [];
  const free = gpus.filter((gpu) => !gpu.worker && !gpu.strangers?.length).length;
  return html`<${Panel} id="gpus" title="GPUs" wide aside=${html`<span class="quiet">${number(gpus.length)} devices, ${number(free)} free</span>`}>
    ${gpus.length === 0 ? html`<p class="quiet">No GPU is known.</p>` : html`<ul class="gpu-strip">${gpus.slice(0, 128).map((gpu) => html`<${Gpu} key=${gpu.uuid} gpu=${gpu} />`)}</ul>`}
  <//>`;
}

function Log({ worker }) {
  const [lines, setLines] = useState(null);
  const [error, setError] = useState(null);
  const offset = useRef(null);
  const box = useRef(null);
  const atEnd = useRef(true);
  useEvery(1000, async (ended) => {
    try {
      const found = await ask(`api/logs/${encodeURIComponent(worker)}?${query({ after: offset.current })}`);
      if (ended()) return;
      offset.current = found.offset;
      setError(null);
      if (found.lines?.length || lines === null) setLines((before) => [...(before ?? []), ...found.lines.map((line) => plain(line, LINE_MAX))].slice(-LINES_MAX));
    } catch (problem) {
      if (!ended()) setError(plain(problem.message, 300));
    }
  }, [worker]);
  useEffect(() => {
    if (box.current && atEnd.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines]);
  const scrolled = ({ target }) => { atEnd.current = target.scrollTop + target.clientHeight > target.scrollHeight - 30; };
  return html`<div>
    ${error && html`<p class="note bad">${error}</p>`}
    <pre class="log" tabindex="0" role="log" aria-label=${`Log of ${name(worker)}`} ref=${box} onScroll=${scrolled}>${lines === null ? "Reading…" : lines.length ? lines.join("\n") : "No line yet."}</pre>
  </div>`;
}

const LOAD = {
  request_active_slots: (value) => `${number(value)} running`,
  num_requests_waiting: (value) => `${number(value)} waiting`,
  gpu_cache_usage_perc: (value) => `KV ${share(value)}`,
};

function loadWords(load) {
  if (load === null || typeof load !== "object") return plain(load, 100);
  const words = Object.entries(LOAD).filter(([key]) => typeof load[key] === "number").map(([key, say]) => say(load[key]));
  return words.join(" · ") || facts(load, 4).map(([key, value]) => `${key} ${value}`).join(" · ") || MISSING;
}

const gpuWords = (gpus) => (Array.isArray(gpus) ? gpus : []).slice(0, 16).map((each) => {
  const index = live.state?.gpus?.find((gpu) => gpu.uuid === each)?.index;
  return index ?? plain(each, 12);
}).join(", ") || MISSING;

function Worker({ id, worker, onAct }) {
  const [open, setOpen] = useState(false);
  const shown = name(id);
  const bad = worker.last_words || worker.reason;
  // The age is counted on from `since`, so that an idle graph needs no event each second.
  const age = typeof worker.since === "number" ? Math.max(0, now() - worker.since) : worker.age_s;
  return html`<tr id=${`worker=${id}`}>
      <th scope="row"><button class="link" aria-expanded=${open} onClick=${() => setOpen(!open)}><span aria-hidden="true">${open ? "▾" : "▸"}</span> <span class="break">${shown}</span></button></th>
      <td data-label="Role">${name(worker.role)}</td>
      <td data-label="State"><${State} value=${name(worker.state)} /></td>
      <td data-label="Age">${duration(age)}</td>
      <td data-label="Load">${loadWords(worker.load)}</td>
      <td data-label="GPUs">${gpuWords(worker.gpus)}</td>
      <td data-label="Restarts">${number(worker.restarts)}</td>
      ${onAct && html`<td data-label="Acts"><button onClick=${() => onAct({ worker: id, component: worker.component })} aria-label=${`Act on ${shown}`}>Act…</button></td>`}
    </tr>
    ${bad && html`<tr class="words"><td colspan="8">
      ${worker.reason && html`<span>${plain(worker.reason, 400)}</span>`}
      ${worker.last_words && html`<pre class="last-words" tabindex="0" aria-label=${`Last words of ${shown}`}>${plain(worker.last_words, 2000)}</pre>`}</td></tr>`}
    ${open && html`<tr class="words"><td colspan="8"><${Log} worker=${id} /></td></tr>`}`;
}

export const now = () => {
  const last = live.points.at(-1)?.t;
  const own = Date.now() / 1000;
  if (live.clockAhead === undefined && live.session?.wall_s) live.clockAhead = live.session.wall_s - own;
  const guess = own + (live.clockAhead ?? 0);
  return last !== undefined && Math.abs(last - guess) < 5 ? Math.max(last, guess) : guess;
};

export function Workers({ onAct }) {
  useLive("state");
  const workers = Object.entries(live.state?.workers ?? {});
  const byComponent = new Map();
  for (const [id, worker] of workers.slice(0, 512)) {
    const component = worker.component ?? MISSING;
    if (!byComponent.has(component)) byComponent.set(component, []);
    byComponent.get(component).push([id, worker]);
  }
  return html`<${Panel} id="workers" title="Workers" wide aside=${html`<span class="quiet">${number(workers.length)} workers</span>`}>
    ${workers.length === 0 && html`<p class="quiet">No worker runs.</p>`}
    ${workers.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="Table of workers"><table class="workers">
      <thead><tr><th scope="col">Worker</th><th scope="col">Role</th><th scope="col">State</th><th scope="col">Age</th><th scope="col">Load</th>
        <th scope="col">GPUs</th><th scope="col">Restarts</th>${onAct && html`<th scope="col">Acts</th>`}</tr></thead>
      ${[...byComponent].map(([component, members]) => html`<tbody key=${component}>
        <tr class="component"><th scope="rowgroup" colspan="8"><span class="break">${name(component)}</span> <span class="quiet">× ${number(members.length)}</span>
          ${onAct && html` <button onClick=${() => onAct({ component })} aria-label=${`Scale ${name(component)}`}>Scale…</button>`}</th></tr>
        ${members.map(([id, worker]) => html`<${Worker} key=${id} id=${id} worker=${worker} onAct=${onAct} />`)}
      </tbody>`)}
    </table></div>`}
  <//>`;
}

/** Models that share the GPUs. A graph of one model has no such panel. */
export function Models() {
  useLive("state");
  const models = live.state?.models ?? [];
  if (models.length === 0) return null;
  return html`<${Panel} id="models" title="Models" wide aside=${html`<span class="quiet">${number(models.length)} models share the GPUs</span>`}>
    <div class="scroll" tabindex="0" role="region" aria-label="Table of models"><table class="models">
      <thead><tr><th scope="col">Model</th><th scope="col">Ready</th><th scope="col">Wanted</th><th scope="col">Asleep</th><th scope="col">Held requests</th><th scope="col">Why</th></tr></thead>
      <tbody>${models.slice(0, 256).map((model) => html`<tr key=${model.component}>
        <th scope="row"><span class="break">${name(model.model)}</span> <span class="quiet">${number(model.gpus_per_worker)} GPU per worker</span></th>
        <td>${number(model.ready)}</td><td>${number(model.target)}</td><td>${number(model.asleep)}</td>
        <td>${model.held > 0 ? `${number(model.held)}, the oldest for ${duration(model.held_s)}` : number(model.held)}</td>
        <td class="break">${model.why ? plain(model.why, 300) : MISSING}</td></tr>`)}</tbody>
    </table></div>
  <//>`;
}

/** Everything that a mark says: the rule, its numbers, and what would have changed it. */
export const MarkDetails = ({ mark }) => html`
  <div class="mark-details">
    <p><b>${plain(mark.title, 200)}</b> <span class="quiet">${clock(mark.t)}${mark.worker ? ` · ${name(mark.worker)}` : ""}</span></p>
    ${mark.reason && html`<p>${plain(mark.reason, 800)}</p>`}
    ${mark.rule && html`<p><span class="quiet">Rule:</span> ${plain(mark.rule, 300)}</p>`}
    ${facts(mark.detail).length > 0 && html`<dl class="facts">${facts(mark.detail, 24).map(
      ([key, value]) => html`<div><dt>${key || "detail"}</dt><dd>${value}</dd></div>`)}</dl>`}
  </div>`;

const MARK_SIGNS = [
  [/refus|reject/, "⊘", "bad"], [/held|hold|wait/, "‖", "warn"], [/crash|fail|dead|kill/, "✕", "bad"], [/drain/, "▽", "busy"],
  [/flip/, "⇄", "busy"], [/sleep/, "☾", "idle"], [/wake/, "☀", "good"], [/decision|plan/, "◆", "plan"], [/start|scale|spawn|add/, "▲", "good"],
];
export const markSign = (mark) => {
  const found = MARK_SIGNS.find(([words]) => words.test(String(mark.kind ?? "").toLowerCase()));
  return found ? { sign: found[1], kind: found[2] } : { sign: "•", kind: "idle" };
};

const WHY_NOT = /held|hold|refus|reject/;

export function Actions() {
  useLive("mark", "state");
  const [which, setWhich] = useState("why");
  const [open, setOpen] = useState(null);
  const all = live.marks;
  const shown = (which === "why" ? all.filter((mark) => WHY_NOT.test(mark.kind ?? "")) : all).slice(-60).reverse();
  const planner = facts(live.state?.planner, 14);
  return html`<${Panel} id="actions" title="Why, and why not more?"
      aside=${html`<div class="tabs" role="group" aria-label="Which actions">
        ${[["why", "Held and refused"], ["all", "All actions"]].map(([key, label]) => html`<button aria-pressed=${which === key} onClick=${() => setWhich(key)}>${label}</button>`)}</div>`}>
    ${planner.length > 0 && html`<details class="planner"><summary>The planner now</summary><dl class="facts">${planner.map(([key, value]) => html`<div><dt>${key}</dt><dd>${value}</dd></div>`)}</dl></details>`}
    ${shown.length === 0 && html`<p class="quiet">${which === "why" ? "Nothing was held or refused." : "Nothing happened yet."}</p>`}
    <ol class="actions">${shown.map((mark) => {
      const { sign, kind } = markSign(mark);
      const key = `${mark.t} ${mark.kind} ${mark.worker} ${mark.title}`;
      return html`<li key=${key}>
        <button class="link action" aria-expanded=${open === key} onClick=${() => setOpen(open === key ? null : key)}>
          <span class=${`sign ${kind}`} aria-hidden="true">${sign}</span> <span class="quiet">${clock(mark.t)}</span> <span class="break">${plain(mark.title, 160)}</span>
        </button>
        ${open === key ? html`<${MarkDetails} mark=${mark} />` : mark.reason && html`<p class="reason">${plain(mark.reason, 240)}</p>`}
      </li>`;
    })}</ol>
  <//>`;
}
