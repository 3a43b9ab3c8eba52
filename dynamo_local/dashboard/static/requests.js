// Requests as waterfalls: lengths and times, never text.

import { html, useLive, useState, useEffect, useEvery, Panel } from "./ui.js";
import { live, ask, query } from "./live.js";
import { MISSING, plain, name, number, duration, clock } from "./words.js";

const PHASES = {
  routed: ["route", "is routed"],
  queued: ["queue", "waits in a queue"],
  prefilled: ["prefill", "prefill"],
  "handed off": ["hand-off", "hand-off of the KV cache"],
  decoded: ["decode", "decode"],
};
const classOf = (phase) => `phase ${(PHASES[phase]?.[0] ?? "other").replace("-", "")}`;
const phasesOf = (request) => (Array.isArray(request.phases) ? request.phases.filter((each) => Array.isArray(each)).slice(0, 12) : []);
const total = (request) =>
  request.total_s ?? phasesOf(request).reduce((sum, [, seconds]) => sum + (seconds ?? 0), 0);

function Waterfall({ request, longest }) {
  const phases = phasesOf(request).filter(([, seconds]) => typeof seconds === "number" && seconds > 0);
  const words = phases.map(([phase, seconds]) => `${PHASES[phase]?.[0] ?? name(phase)} ${duration(seconds)}`).join(", ") || "no phase is known";
  return html`<span class="waterfall" role="img" aria-label=${words} title=${words}>
    ${phases.map(([phase, seconds]) => html`<span class=${classOf(phase)} style=${{ width: `${Math.max(0.4, (100 * seconds) / Math.max(longest, 1e-6))}%` }}></span>`)}
  </span>`;
}

const good = (outcome) => ["success", "completed"].includes(outcome);

function Request({ request, longest }) {
  const [open, setOpen] = useState(false);
  const fine = good(request.outcome);
  return html`<li class="request" id=${`request-${request.id}`}>
    <button class="link request-row" aria-expanded=${open} onClick=${() => setOpen(!open)}>
      <span class=${`sign ${fine ? "good" : "bad"}`} aria-hidden="true">${fine ? "✓" : "✕"}</span>
      <span class="request-id clip">${name(request.id)}</span>
      <span class="quiet">${clock(request.t)}</span>
      <span class=${fine ? "quiet" : "bad"}>${plain(request.outcome, 60)}</span>
      <span class="request-total">${duration(total(request))}</span>
    </button>
    <${Waterfall} request=${request} longest=${longest} />
    ${open && html`<div class="request-open">
      <dl class="facts">
        ${[["model", name(request.model)], ["prefill on", name(request.prefill_worker)], ["decode on", name(request.worker)],
          ["prompt", `${number(request.prompt_tokens)} tokens`], ["cached", `${number(request.cached_tokens)} tokens`], ["answer", `${number(request.tokens)} tokens`],
          ["TTFT", duration(request.ttft_s)], ["ITL", duration(request.itl_s)], ["total", duration(request.total_s)],
          ["missed", Array.isArray(request.missed) ? request.missed.map((each) => plain(each, 40)).join(", ") || "nothing" : MISSING]].map(
          ([key, value]) => html`<div><dt>${key}</dt><dd>${value}</dd></div>`)}
      </dl>
      <table class="phases"><caption class="sr">Phases of ${name(request.id)}</caption><thead><tr><th scope="col">Phase</th><th scope="col">Time</th><th scope="col">Worker</th></tr></thead>
        <tbody>${phasesOf(request).map(([phase, seconds]) => html`<tr><th scope="row"><span class=${classOf(phase)} aria-hidden="true"></span> ${PHASES[phase]?.[1] ?? name(phase)}</th><td>${duration(seconds)}</td>
          <td>${phase === "prefilled" ? name(request.prefill_worker ?? request.worker) : phase === "decoded" ? name(request.worker) : MISSING}</td></tr>`)}</tbody></table>
    </div>`}
  </li>`;
}

export function Requests() {
  useLive("request");
  const [kind, setKind] = useState("latest");
  const [asked, setAsked] = useState({ kind: "", list: [] });
  const [wanted, setWanted] = useState("");
  const [found, setFound] = useState(null);
  useEffect(() => {
    // A problem of the verdict links to `#requests=failed`.
    const follow = () => {
      const wished = /^#requests=(latest|slowest|failed)$/.exec(location.hash)?.[1];
      if (!wished) return;
      setFound(null);
      setKind(wished);
      document.getElementById("requests")?.scrollIntoView();
    };
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  useEvery(5000, async (ended) => {
    if (kind === "latest") return;
    const answer = await ask(`api/requests?${query({ kind, limit: 50 })}`);
    if (!ended()) setAsked({ kind, list: answer.requests ?? answer });
  }, [kind]);
  const find = async (event) => {
    event.preventDefault();
    const id = wanted.trim().slice(0, 256);
    if (!id) { setFound(null); return; }
    try {
      const answer = await ask(`api/requests?${query({ id })}`);
      const list = answer.requests ?? answer;
      setFound({ id, list: Array.isArray(list) ? list : list ? [list] : [] });
    } catch (error) {
      setFound({ id, list: [], error: plain(error.message, 200) });
    }
  };
  const list = found ? found.list : kind === "latest" ? [...live.requests].reverse().slice(0, 50) : asked.kind === kind ? asked.list : [];
  const longest = list.reduce((most, request) => Math.max(most, total(request) || 0), 0);
  return html`<${Panel} id="requests" title="Requests" aside=${html`<div class="tabs" role="group" aria-label="Which requests">
      ${["latest", "slowest", "failed"].map((each) => html`<button aria-pressed=${!found && kind === each} onClick=${() => { setFound(null); setKind(each); }}>${each}</button>`)}</div>`}>
    <form class="find" role="search" onSubmit=${find}><label for="find-id">Find by x-request-id</label>
      <input id="find-id" value=${wanted} maxlength="256" autocomplete="off" spellcheck="false" onInput=${(event) => setWanted(event.target.value)} />
      <button>Find</button>${found && html`<button type="button" onClick=${() => { setFound(null); setWanted(""); }}>Clear</button>`}</form>
    <p class="key" aria-hidden="true">${Object.entries(PHASES).map(([phase, [word]]) => html`<span><span class=${classOf(phase)}></span>${word}</span>`)}</p>
    ${list.length === 0 && html`<p class="quiet" role="status">${found ? (found.error ?? `No request ${name(found.id)} is kept.`) : "No request yet."}</p>`}
    <ol class="requests">${list.map((request) => html`<${Request} key=${request.id} request=${request} longest=${longest} />`)}</ol>
  <//>`;
}
