// Enter the session, draw the page, start the stream.

import { html, render, useState, useLive, Guard } from "./ui.js";
import { live, ask, enter, start, Refused } from "./live.js";
import { Connection, Verdict, Gpus, Models, Workers, Actions } from "./panels.js";
import { Time } from "./charts.js";
import { Requests } from "./requests.js";
import { ActDialog, WhatIf } from "./acts.js";
import { name, zone, plain } from "./words.js";

function Page() {
  useLive("connection");
  const [target, setTarget] = useState(null);
  const { session } = live;
  const act = session.read_only ? null : setTarget;
  return html`
    <a class="skip" href="#time">Skip to the charts</a>
    <header class="top"><h1 class="brand">${name(session.namespace)} <span class="quiet">dynamo-local ${plain(session.version, 20)}</span></h1>
      <nav aria-label="Panels">${[["gpus", "GPUs"], ["time", "Time"], ["actions", "Why"], ["workers", "Workers"], ["requests", "Requests"], ["whatif", "What if"]].map(
        ([id, word]) => html`<a href=${`#${id}`}>${word}</a>`)}</nav>
      ${session.read_only && html`<span class="badge">read-only</span>`}
      ${act && html`<button onClick=${() => act({})}>Act…</button>`}
      <${Connection} /></header>
    <main>
      <${Guard}><${Verdict} /><//>
      <${Gpus} />
      <${Guard}><${Models} /><//>
      <${Time} />
      <${Workers} onAct=${act} />
      <${Actions} />
      <${Requests} />
      <${WhatIf} />
    </main>
    <footer class="quiet">Times are in ${zone()}. Units: s, ms, GiB. ${"–"} means unknown.</footer>
    ${target && html`<${ActDialog} target=${target} onClose=${() => setTarget(null)} />`}`;
}

const app = document.getElementById("app");
const show = (tree) => { render(null, app); app.textContent = ""; render(tree, app); };

function Password({ wrong }) {
  const log = async (event) => {
    event.preventDefault();
    try {
      await ask("api/session", { method: "POST", body: { password: new FormData(event.target).get("password") } });
      await begin();
    } catch (error) {
      show(html`<${Password} wrong=${plain(error.message, 200)} />`);
    }
  };
  return html`<main><form class="panel" onSubmit=${log}><h1 class="brand">dynamo-local</h1><label class="field">Password<input type="password" name="password" autocomplete="current-password" required autofocus /></label>
    ${wrong && html`<p class="note bad" role="alert">${wrong}</p>`}<div class="buttons"><button class="primary">Enter</button></div></form></main>`;
}

async function begin() {
  await enter();
  document.title = `${name(live.session.namespace)} · dynamo-local`;
  show(html`<${Page} />`);
  start();
  performance.mark("page-drawn");
}

try {
  await begin();
} catch (error) {
  if (error instanceof Refused && error.answer?.password) show(html`<${Password} />`);
  else stopped(error);
}

function stopped(error) {
  const locked = error instanceof Refused && error.status === 401;
  show(html`<main><section class="verdict-box bad" role="alert"><p class="verdict">${locked ? "This page needs a session." : "The server does not answer."}</p>
    <p>${locked ? "A code is good for one time. Get a new one: " : `${plain(error.message, 200)}. `}<code>dynamo dashboard --open</code></p></section></main>`);
}
