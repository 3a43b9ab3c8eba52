// Parts that every panel uses. `html` makes text nodes of all values: nothing that is shown can be markup.

import { h, render, Component } from "./vendor/preact.js";
import { useState, useEffect, useRef, useMemo, useCallback } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";
import { on } from "./live.js";

export const html = htm.bind(h);
export { render, useState, useEffect, useRef, useMemo, useCallback };

/** Draw again after changes of these topics. */
export function useLive(...topics) {
  const [, again] = useState(0);
  useEffect(() => {
    const ends = topics.map((topic) => on(topic, () => again((count) => count + 1)));
    return () => ends.forEach((end) => end());
  }, []);
}

/** One panel that fails says so; the others go on. */
export class Guard extends Component {
  componentDidCatch(error) {
    console.error(error);
    this.setState({ failed: String(error?.message ?? error).slice(0, 200) });
  }

  render() {
    if (!this.state?.failed) return this.props.children;
    return html`<p class="note bad" role="alert">This part could not be drawn: ${this.state.failed}
      <button onClick=${() => this.setState({ failed: null })}>Try again</button></p>`;
  }
}

export const Panel = ({ id, title, aside, children, wide }) => html`
  <section class=${wide ? "panel wide" : "panel"} id=${id} aria-labelledby=${`${id}-title`}>
    <div class="panel-head"><h2 id=${`${id}-title`}>${title}</h2>${aside}</div>
    <${Guard}>${children}<//>
  </section>`;

const SIGNS = { good: "●", busy: "◐", idle: "○", bad: "✕", unknown: "?" };
const KINDS = [
  [/^(ready|running|serving|active|ok|registered|held|in use)/i, "good"],
  [/^(start|drain|flip|wak|prewarm|loading|restart|stopping|retir|prepar)/i, "busy"],
  [/^(sleep|asleep|idle|free|parked|stopped)/i, "idle"],
  [/^(crash|fail|dead|quarantin|stranger|lost|gone|kill|broken|refus|fault|timed)/i, "bad"],
];

export const kindOf = (state) => KINDS.find(([words]) => words.test(state ?? ""))?.[1] ?? "unknown";

/** A state as sign, colour and word. */
export const State = ({ value }) => {
  const kind = kindOf(value);
  return html`<span class=${`state ${kind}`}><span aria-hidden="true">${SIGNS[kind]}</span> ${value}</span>`;
};

/** A share between 0 and 1 as a bar, with its words. */
export const Bar = ({ value, label, text }) => html`
  <span class="bar" role="img" aria-label=${`${label}: ${text}`}>
    <span class="bar-fill" style=${{ width: `${Math.max(0, Math.min(1, value ?? 0)) * 100}%` }}></span>
    <span class="bar-text" aria-hidden="true">${text}</span>
  </span>`;

/** Call `work` now and each `everyMs`, one at a time, while the tab is seen. */
export function useEvery(everyMs, work, inputs) {
  useEffect(() => {
    let timer = 0;
    let ended = false;
    const turn = async () => {
      if (!document.hidden) {
        try { await work(() => ended); } catch { /* the next turn tries again */ }
      }
      if (!ended) timer = setTimeout(turn, everyMs);
    };
    turn();
    return () => { ended = true; clearTimeout(timer); };
  }, inputs);
}
