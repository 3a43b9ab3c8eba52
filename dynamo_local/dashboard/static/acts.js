// What changes something: first what it would do, then a question, then what came of it. And what-if runs.

import { html, useState, useEffect, useRef, useLive, useEvery, Panel } from "./ui.js";
import { live, ask } from "./live.js";
import { MISSING, plain, name, duration, facts } from "./words.js";

// The server asks for the same names: a page that does not is refused.
const ACTS = {
  scale: { word: "Scale", on: "component", value: "Workers (such as 3, +1 or -1)" },
  drain: { word: "Drain", on: "worker", destructive: true, help: "The worker finishes what it streams, then ends." },
  cancel: { word: "Cancel the drain", on: "worker", help: "The worker serves on." },
  flip: { word: "Flip the role", on: "worker", destructive: true, help: "The worker changes between prefill and decode." },
  sleep: { word: "Sleep", on: "worker", destructive: true, help: "The worker gives its GPU memory back and keeps its process." },
  wake: { word: "Wake", on: "worker" },
  restart: { word: "Restart", on: "worker", destructive: true, help: "A new process takes the worker's place." },
  pause: { word: "Pause the planner", on: "planner" },
  resume: { word: "Resume the planner", on: "planner" },
  apply: { word: "Apply a file", on: "planner", value: "Configuration file on the server, by its whole path", destructive: true },
};

const subject = (act, target, value) => (ACTS[act].on === "worker" ? target.worker : act === "apply" ? value.split("/").at(-1) : target.component);

function Would({ answer }) {
  return html`<pre class="answer" tabindex="0" aria-label="What it would do">${plain(answer.text, 4000)}</pre>
    ${answer.would?.length > 0 && html`<ul class="would">${answer.would.slice(0, 40).map((each) => html`<li>${
      typeof each === "string" ? plain(each, 300) : facts(each, 6).map(([key, value]) => `${key}: ${value}`).join(", ")}</li>`)}</ul>`}`;
}

export function ActDialog({ target, onClose }) {
  const dialog = useRef(null);
  const group = target.worker ? "worker" : target.component ? "component" : "planner";
  const choices = Object.entries(ACTS).filter(([, act]) => act.on === group);
  const [act, setAct] = useState(choices[0][0]);
  const [value, setValue] = useState("");
  const [confirm, setConfirm] = useState("");
  const [step, setStep] = useState({ at: "choose" });
  const [busy, setBusy] = useState(false);
  const back = useRef(document.activeElement);
  useEffect(() => {
    dialog.current.showModal();
    return () => back.current?.focus?.();
  }, []);
  const body = () => {
    const made = { act };
    if (ACTS[act].on === "worker") made.worker = target.worker;
    if (ACTS[act].on === "component") made.component = target.component;
    if (ACTS[act].value) made.value = act === "scale" && /^\d+$/.test(value.trim()) ? `=${value.trim()}` : value.trim();
    return made;
  };
  const call = async (more, at) => {
    setBusy(true);
    try {
      setStep({ at, answer: await ask("api/acts", { method: "POST", body: { ...body(), ...more } }) });
    } catch (error) {
      setStep((before) => ({ ...before, error: plain(error.message, 1000) }));
    }
    setBusy(false);
  };
  const dry = (event) => { event.preventDefault(); setConfirm(""); setStep({ at: "choose" }); call({ dry_run: true }, "ask"); };
  const wanted = subject(act, target, value);
  const destructive = ACTS[act].destructive;
  const may = !destructive || confirm === wanted;
  const really = (event) => { event.preventDefault(); if (may) call({ dry_run: false, ...(destructive ? { confirm } : {}) }, "done"); };
  const title = group === "worker" ? name(target.worker) : group === "component" ? name(target.component) : "The graph and its planner";
  return html`<dialog ref=${dialog} class="act" aria-labelledby="act-title" onClose=${onClose}>
    <h2 id="act-title" class="break">${title}</h2>
    ${step.at === "choose" && html`<form onSubmit=${dry}>
      <fieldset><legend>What to do</legend>${choices.map(([key, each]) => html`<label class="choice"><input type="radio" name="act" value=${key} checked=${act === key} onChange=${() => { setAct(key); setValue(""); }} />
        <span>${each.word}${each.help && html` <span class="quiet">${each.help}</span>`}</span></label>`)}</fieldset>
      ${ACTS[act].value && html`<label class="field">${ACTS[act].value}<input required value=${value} maxlength="400" autocomplete="off" spellcheck="false" onInput=${(event) => setValue(event.target.value)} /></label>`}
      <div class="buttons"><button class="primary" disabled=${busy}>${busy ? "Asking…" : "Show what it would do"}</button><button type="button" onClick=${() => dialog.current.close()}>Close</button></div>
    </form>`}
    ${step.at === "ask" && html`<form onSubmit=${really}>
      <p><b>${ACTS[act].word}</b> would do this:</p><${Would} answer=${step.answer} />
      ${destructive && html`<label class="field">Type <code class="break">${plain(wanted, 300)}</code> to confirm<input required value=${confirm} autocomplete="off" autocapitalize="off" spellcheck="false" onInput=${(event) => setConfirm(event.target.value)} /></label>`}
      <div class="buttons"><button class=${destructive ? "danger" : "primary"} disabled=${busy || !may}>${busy ? "Working…" : `${ACTS[act].word} now`}</button>
        <button type="button" onClick=${() => setStep({ at: "choose" })}>Back</button></div>
    </form>`}
    ${step.at === "done" && html`<div><p role="status"><span class="sign good" aria-hidden="true">✓</span> Done.</p><pre class="answer" tabindex="0" aria-label="The answer">${plain(step.answer?.text, 4000)}</pre>
      <div class="buttons"><button class="primary" autofocus onClick=${() => dialog.current.close()}>Close</button></div></div>`}
    ${step.error && html`<p class="note bad" role="alert">${step.error}</p>`}
  </dialog>`;
}

const POLICIES = [["", "as it is"], ["load", "load"], ["sla", "sla"], ["slo", "slo"], ["throughput-load", "throughput-load"]];

function Result({ run }) {
  const beside = run.beside ?? run.result?.beside ?? null;
  const result = facts(run.result, 40);
  const happened = new Map(facts(beside, 40));
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Result of the what-if"><table>
    <thead><tr><th scope="col">Figure</th><th scope="col">What if</th>${beside && html`<th scope="col">What happened</th>`}</tr></thead>
    <tbody>${result.map(([key, value]) => html`<tr><th scope="row">${key || "result"}</th><td>${value}</td>${beside && html`<td>${happened.get(key) ?? MISSING}</td>`}</tr>`)}</tbody></table></div>`;
}

export function WhatIf() {
  useLive("connection");
  const [form, setForm] = useState({ hours: "1", policy: "", ttft: "", itl: "", fleet: "" });
  const [run, setRun] = useState(null);
  const [error, setError] = useState(null);
  const set = (key) => (event) => setForm({ ...form, [key]: event.target.value });
  const running = run && !["done", "failed", "cancelled"].includes(run.state);
  useEvery(1000, async (ended) => {
    if (!running || !run.id) return;
    const found = await ask(`api/whatif/${encodeURIComponent(run.id)}`);
    if (!ended()) setRun({ ...found, id: run.id });
  }, [run?.id, running]);
  const begin = async (event) => {
    event.preventDefault();
    setError(null);
    const targets = {};
    if (form.ttft) targets.ttft_ms = Number(form.ttft);
    if (form.itl) targets.itl_ms = Number(form.itl);
    try {
      const { id } = await ask("api/whatif", { method: "POST", body: { hours: Number(form.hours), policy: form.policy || null, targets, fleet: form.fleet.trim() ? form.fleet.split(",").map(Number) : null } });
      setRun({ id, state: "running" });
    } catch (problem) {
      setError(plain(problem.message, 500));
    }
  };
  const cancel = async () => {
    try { setRun({ ...(await ask(`api/whatif/${encodeURIComponent(run.id)}`, { method: "DELETE" })), id: run.id, state: "cancelled" }); } catch (problem) { setError(plain(problem.message, 500)); }
  };
  const progress = typeof run?.progress === "number" ? run.progress : null;
  return html`<${Panel} id="whatif" title="What if" wide>
    <div class="whatif">
      ${live.session.read_only ? html`<p class="quiet">This page is read-only: it begins no run.</p>` : html`<form onSubmit=${begin}>
        <p class="quiet">Replays what was recorded, in a process of low priority. Nothing that runs is changed.</p>
        <label class="field">Hours to replay<input type="number" min="0.1" max="744" step="0.1" required value=${form.hours} onInput=${set("hours")} /></label>
        <label class="field">Policy<select value=${form.policy} onChange=${set("policy")}>${POLICIES.map(([value, word]) => html`<option value=${value}>${word}</option>`)}</select></label>
        <label class="field">TTFT target, ms<input type="number" min="1" step="any" placeholder="as it is" value=${form.ttft} onInput=${set("ttft")} /></label>
        <label class="field">ITL target, ms<input type="number" min="0.1" step="any" placeholder="as it is" value=${form.itl} onInput=${set("itl")} /></label>
        <label class="field">Fleet, prefill and decode workers<input placeholder="as it is, or 2, 3" pattern=" *[0-9]+ *, *[0-9]+ *" maxlength="200" autocomplete="off" value=${form.fleet} onInput=${set("fleet")} /></label>
        <div class="buttons"><button class="primary" disabled=${running}>Run</button>${running && html`<button type="button" onClick=${cancel}>Cancel</button>`}</div>
        ${error && html`<p class="note bad" role="alert">${error}</p>`}
      </form>`}
      <div class="whatif-result" aria-live="polite">
        ${!run && html`<p class="quiet">The result stands here, beside what happened.</p>`}
        ${running && html`<p>Running${run.seconds ? `, ${duration(run.seconds)}` : ""}… ${progress !== null && html`<progress value=${progress} max="1" aria-label="Progress"></progress>`}</p>`}
        ${run?.state === "cancelled" && html`<p>Cancelled.</p>`}
        ${(run?.state === "failed" || run?.error) && html`<p class="note bad">${plain(run.error ?? run.result, 800)}</p>`}
        ${run?.state === "done" && html`<${Result} run=${run} />`}
        ${run?.command && html`<p class="quiet break">${plain(run.command, 300)}</p>`}
      </div>
    </div>
  <//>`;
}
