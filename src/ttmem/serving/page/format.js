// Figures as people read them.

const plain = new Intl.NumberFormat("en");

export const count = (value) => plain.format(value);

export function bytes(value) {
  if (!Number.isFinite(value)) return "not known";
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= size) return `${(value / size).toFixed(value >= 100 * size ? 0 : 1)} ${unit}`;
  }
  return `${value} B`;
}

export function duration(seconds) {
  if (seconds < 1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const percent = (part) => `${(100 * part).toFixed(part > 0.99 && part < 1 ? 1 : 0)} %`;

// Three figures, whatever the size.
export function figure(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return count(Math.round(value));
  return size < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

export const title = (memory) => memory.name ?? memory.details?.document?.name ?? memory.id;

export const date = (seconds) => new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
