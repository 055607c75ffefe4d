// Numbers as people read them.

const DASH = "–";

export function number(value) {
  if (value === null || value === undefined) return DASH;
  const size = Math.abs(value);
  if (size >= 10000) return `${(value / 1000).toFixed(size >= 100000 ? 0 : 1)} k`;
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1).replace(/\.0$/, "");
  return value.toFixed(2).replace(/\.?0+$/, "") || "0";
}

export function ms(value) {
  if (value === null || value === undefined) return DASH;
  if (value >= 1000) return `${number(value / 1000)} s`;
  return `${number(value)} ms`;
}

export function percent(part) {
  if (part === null || part === undefined) return DASH;
  const value = 100 * part;
  if (value === 0) return "0 %";
  return `${value >= 9.95 ? value.toFixed(0) : value >= 0.095 ? value.toFixed(1) : "< 0.1"} %`;
}

export function ago(milliseconds) {
  const seconds = milliseconds / 1000;
  if (seconds < 90) return `${Math.max(0, seconds).toFixed(0)} s ago`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min ago`;
  return `${(seconds / 3600).toFixed(1)} h ago`;
}
