// What the page knows, and how it learns it: the session, one stream of events, and questions to the server.

const POINTS_MAX = 3600;
const MARKS_MAX = 1000;
const REQUESTS_MAX = 200;
const SILENT_MS = 20000; // the server says something each 15 s
const FIRST_MS = 4000;
const POLL_MS = 2000;
const POLLS = 30;
const LATER_MS = [500, 1000, 2000, 5000, 10000];

export const live = {
  session: null,
  connection: "connecting", // live, poll, paused, lost, refused
  state: null,
  points: [],
  marks: [],
  requests: [],
  gaps: [],
};

const listeners = new Map();

/** Call `listener` after a change of that topic: state, point, mark, request, gap, connection. */
export function on(topic, listener) {
  if (!listeners.has(topic)) listeners.set(topic, new Set());
  listeners.get(topic).add(listener);
  return () => listeners.get(topic).delete(listener);
}

function tell(topic) {
  for (const listener of [...(listeners.get(topic) ?? [])]) listener();
}

function become(connection) {
  if (live.connection === connection) return;
  live.connection = connection;
  tell("connection");
}

export class Refused extends Error {
  constructor(status, text, answer) {
    super(text);
    this.status = status;
    this.answer = answer;
  }
}

export async function ask(path, options = {}) {
  const headers = { Accept: "application/json" };
  if (options.method && options.method !== "GET") {
    headers["Content-Type"] = "application/json";
    if (live.session?.token) headers["X-Dynamo-Token"] = live.session.token;
  }
  const answer = await fetch(path, {
    method: options.method ?? "GET",
    headers,
    body: options.body === undefined ? undefined : JSON.stringify(options.body),
    signal: options.signal,
    credentials: "same-origin",
    cache: "no-store",
  });
  if (answer.status === 204) return null;
  const text = await answer.text();
  let found = null;
  try { found = JSON.parse(text); } catch { /* not ours: a proxy's page */ }
  if (!answer.ok) throw new Refused(answer.status, found?.error ?? `${answer.status} ${answer.statusText}`, found);
  return found;
}

export const query = (values) =>
  new URLSearchParams(Object.entries(values).filter(([, value]) => value !== undefined && value !== null)).toString();

/** RFC 7386. */
export function patched(target, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const found = target !== null && typeof target === "object" && !Array.isArray(target) ? { ...target } : {};
  for (const [key, value] of Object.entries(patch)) {
    if (key === "__proto__") continue;
    if (value === null) delete found[key];
    else found[key] = patched(found[key], value);
  }
  return found;
}

const bounded = (list, most) => (list.length > most ? list.slice(list.length - most) : list);

export function take(kind, value) {
  if (kind === "snapshot") {
    live.state = value.state ?? {};
    const last = value.points?.[0]?.t ?? Infinity;
    live.points = bounded([...live.points.filter((point) => point.t < last), ...(value.points ?? [])], POINTS_MAX);
    live.marks = bounded(value.marks ?? [], MARKS_MAX);
    live.requests = bounded(value.requests ?? [], REQUESTS_MAX);
    for (const topic of ["state", "mark", "request", "point"]) tell(topic);
  } else if (kind === "state") {
    live.state = patched(live.state, value);
    tell("state");
  } else if (kind === "point") {
    live.points.push(value);
    if (live.points.length > POINTS_MAX + 300) live.points = bounded(live.points, POINTS_MAX);
    tell("point");
  } else if (kind === "mark") {
    live.marks = bounded([...live.marks, value], MARKS_MAX);
    tell("mark");
  } else if (kind === "request") {
    live.requests = bounded([...live.requests, value], REQUESTS_MAX);
    tell("request");
  } else if (kind === "gap") {
    // A gap that ends comes again, with its end.
    live.gaps = bounded([...live.gaps.filter((gap) => gap.from !== value.from), value], MARKS_MAX);
    tell("gap");
  }
}

/** The one-time code of the address is exchanged for a cookie, and leaves the address at once. */
export async function enter() {
  const code = /^#code=([\w-]{16,200})$/.exec(location.hash)?.[1];
  if (code) {
    history.replaceState(null, "", location.pathname + location.search);
    try {
      await ask("api/session", { method: "POST", body: { code } });
    } catch (error) {
      if (!(error instanceof Refused)) throw error; // a used code: the cookie may still be good
    }
  }
  live.session = await ask("api/session");
}

let lastId = null;
let source = null;
let failures = 0;
let watchdog = 0;
let pollTimer = 0;
let polling = false;
let polls = 0;
const KINDS = ["snapshot", "state", "point", "mark", "request", "gap"];

function heard() {
  failures = 0;
  clearTimeout(watchdog);
  watchdog = setTimeout(silent, SILENT_MS);
  if (document.hidden) return;
  if (polling) stopPolling();
  become("live");
}

function received(kind, id, text) {
  lastId = id || lastId;
  take(kind, typeof text === "string" ? JSON.parse(text) : text);
}

function silent() {
  close();
  startPolling();
}

function close() {
  clearTimeout(watchdog);
  source?.close();
  source = null;
}

function open() {
  close();
  const opened = new EventSource(`api/stream?${query({ after: lastId })}`);
  source = opened;
  for (const kind of KINDS) {
    opened.addEventListener(kind, (event) => {
      if (source !== opened) return;
      heard();
      received(kind, event.lastEventId, event.data);
    });
  }
  // We make a new stream ourselves, so that `after` is in the address and the wait grows.
  opened.onerror = () => {
    if (source === opened) lost();
  };
  watchdog = setTimeout(silent, FIRST_MS);
}

async function lost() {
  close();
  become("lost");
  const wait = LATER_MS[Math.min(failures, LATER_MS.length - 1)];
  failures += 1;
  watchdog = setTimeout(async () => {
    try {
      live.session = await ask("api/session");
    } catch (error) {
      if (error instanceof Refused && [401, 403].includes(error.status)) {
        become("refused");
        return;
      }
      if (!document.hidden) lost();
      return;
    }
    if (!document.hidden) open();
  }, wait);
}

function startPolling() {
  if (polling) return;
  polling = true;
  polls = 0;
  become("poll");
  pollOnce();
}

function stopPolling() {
  polling = false;
  clearTimeout(pollTimer);
}

async function pollOnce() {
  try {
    const found = await ask(`api/poll?${query({ after: lastId })}`);
    for (const event of found?.events ?? []) received(event.event, event.id, event.data);
    become("poll");
  } catch {
    if (polling) {
      stopPolling();
      lost();
    }
    return;
  }
  polls += 1;
  if (polling && polls >= POLLS) { // the stream may work again: an arbiter that was away made it silent, too
    stopPolling();
    open();
  } else if (polling) pollTimer = setTimeout(pollOnce, POLL_MS);
}

export function start() {
  document.addEventListener("visibilitychange", () => {
    if (live.connection === "refused") return;
    if (document.hidden) {
      close();
      stopPolling();
      become("paused");
    } else open();
  });
  addEventListener("pagehide", close);
  if (document.hidden) become("paused");
  else open();
}
