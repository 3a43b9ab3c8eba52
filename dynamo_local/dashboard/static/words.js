// Text, numbers and times as the reader sees them. All text from the server is hostile: names, reasons, log lines.

export const MISSING = "–";
const TEXT_MAX = 2000;
const NAME_MAX = 80;

// Escape sequences of terminals (CSI, OSC and two-byte ones), then control characters and marks that turn the
// direction of text around, which could make a name look like another one.
const ESCAPES = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])/g;
const UNSEEN = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff]/g;

export function plain(value, longest = TEXT_MAX) {
  if (value === null || value === undefined || value === "") return MISSING;
  // Cut first: a line of 10 MB must not be searched.
  const text = (typeof value === "string" ? value : JSON.stringify(value)).slice(0, longest * 2);
  const clean = text.replace(ESCAPES, "").replace(UNSEEN, "\ufffd");
  return clean.length > longest ? `${clean.slice(0, longest)}…` : clean;
}

export const name = (value) => plain(value, NAME_MAX);

const known = (value) => typeof value === "number" && Number.isFinite(value);
const formats = new Map();

export function number(value, digits = 0) {
  if (!known(value)) return MISSING;
  if (!formats.has(digits)) formats.set(digits, new Intl.NumberFormat(undefined, { maximumFractionDigits: digits }));
  return formats.get(digits).format(value);
}

/** Three figures that count: 0.123, 1.23, 12.3, 123. */
export function figure(value) {
  if (!known(value)) return MISSING;
  const size = Math.abs(value);
  return number(value, size >= 100 || value === 0 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

export function share(value, digits = 0) {
  return known(value) ? `${number(value * 100, digits)} %` : MISSING;
}

export function bytes(value) {
  if (!known(value)) return MISSING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(value) >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${number(value, value < 10 && at ? 1 : 0)} ${units[at]}`;
}

export function duration(seconds) {
  if (!known(seconds)) return MISSING;
  if (seconds < 1) return `${number(seconds * 1000, seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${number(seconds, seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

const clockOnly = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const dayAndClock = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

export function clock(seconds) {
  if (!known(seconds)) return MISSING;
  const then = new Date(seconds * 1000);
  return (then.toDateString() === new Date().toDateString() ? clockOnly : dayAndClock).format(then);
}

export const zone = () => {
  const parts = new Intl.DateTimeFormat(undefined, { timeZoneName: "longOffset" }).formatToParts(new Date());
  const offset = parts.find((part) => part.type === "timeZoneName")?.value ?? "";
  const place = new Intl.DateTimeFormat().resolvedOptions().timeZone;
  return place && place !== offset ? `${place} (${offset})` : offset;
};

/** An object as `key: value` lines, at most so many. */
export function facts(value, most = 12) {
  if (value === null || value === undefined || value === "") return [];
  if (typeof value !== "object") return [["", plain(value)]];
  const found = [];
  const walk = (inner, before, depth) => {
    for (const [key, each] of Object.entries(inner)) {
      if (found.length >= most) return;
      const label = plain(before ? `${before} ${key}` : key, NAME_MAX).replaceAll("_", " ");
      if (each !== null && typeof each === "object" && depth < 3) walk(each, label, depth + 1);
      else found.push([label, typeof each === "number" ? figure(each) : plain(each === false ? "no" : each === true ? "yes" : each, 400)]);
    }
  };
  walk(value, "", 0);
  return found;
}
