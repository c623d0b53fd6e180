/** Figures as text. A missing figure is an en dash. */

const NONE = "–";
const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

export function count(value: number | null | undefined): string {
  return value == null ? NONE : value.toLocaleString("en-US");
}

/** A number that names a version: without separators. */
export function version(value: number | null | undefined): string {
  return value == null ? NONE : String(value);
}

export function bytes(value: number | null | undefined): string {
  if (value == null) return NONE;
  let [size, unit] = [value, 0];
  while (size >= 999.5 && unit < UNITS.length - 1) [size, unit] = [size / 1000, unit + 1];
  return `${unit === 0 ? size : digits(size)} ${UNITS[unit]}`;
}

export function seconds(value: number | null | undefined): string {
  if (value == null) return NONE;
  if (value < 0.0005) return "0 ms";
  if (value < 0.9995) return `${digits(value * 1000)} ms`;
  if (value < 119.5) return `${digits(value)} s`;
  if (value < 7170) return `${Math.round(value / 60)} min`;
  return value < 172_800 ? `${digits(value / 3600)} h` : `${count(Math.round(value / 86_400))} days`;
}

/** Whole seconds, minutes, hours: what ticks. */
export function age(value: number | null): string {
  if (value === null) return "?";
  const whole = Math.max(0, Math.round(value));
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.round(whole / 60)} min`;
  return whole < 172_800 ? `${Math.round(whole / 3600)} h` : `${count(Math.round(whole / 86_400))} days`;
}

export function percent(share: number | null | undefined): string {
  return share == null ? NONE : `${digits(share * 100)}%`;
}

export function times(ratio: number | null | undefined): string {
  return ratio == null ? NONE : `${digits(ratio)}×`;
}

/** A ratio to be read, not to be reckoned with. */
export function round(ratio: number): string {
  return ratio < 10 ? digits(ratio) : count(Math.round(ratio));
}

export function clock(unixSeconds: number | null | undefined): string {
  if (unixSeconds == null) return NONE;
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");
}

export function date(unixSeconds: number | null | undefined): string {
  if (unixSeconds == null) return NONE;
  const moment = new Date(unixSeconds * 1000);
  return `${moment.toLocaleDateString("en-CA")} ${moment.toLocaleTimeString("en-GB")}`;
}

/** Three digits that count. */
function digits(value: number): string {
  if (value === 0) return "0";
  const behind = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value)) + 1e-9));
  return value.toLocaleString("en-US", { minimumFractionDigits: Math.min(behind, 2), maximumFractionDigits: Math.min(behind, 4) });
}

/** Names (`step_5`, `adapter/math`) keep their first letter. */
export function sentence(text: string): string {
  if (!/^[a-z]+[ ,:;]/.test(text)) return text;
  return text.charAt(0).toUpperCase() + text.slice(1);
}
