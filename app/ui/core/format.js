/** Numbers as people read them. */

const LOCALE = "en";
const whole = new Intl.NumberFormat(LOCALE, { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat(LOCALE, { maximumSignificantDigits: 3 });

export const count = (number) => whole.format(number);
export const decimal = (number, digits = 3) => number.toFixed(digits);
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export function bytes(number) {
  if (number < 1000) return `${whole.format(number)} B`;
  for (const [unit, size] of [
    ["KB", 1e3],
    ["MB", 1e6],
  ]) {
    if (number < size * 1000) return `${short.format(number / size)} ${unit}`;
  }
  return `${short.format(number / 1e9)} GB`;
}

export function milliseconds(number) {
  if (number >= 1000) return `${short.format(number / 1000)} s`;
  return `${number < 10 ? number.toFixed(1) : whole.format(number)} ms`;
}

export function duration(seconds) {
  if (seconds < 90) return `${whole.format(Math.max(1, seconds))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** A rate or an amount with few digits: 0.42, 12.3, 1,234. */
export const amount = (number) => (number >= 100 ? whole.format(number) : short.format(number));

const clock = new Intl.DateTimeFormat(LOCALE, { timeStyle: "medium", hourCycle: "h23" });
/** The time of day of a moment in milliseconds: 14:02:10. */
export const time = (at) => clock.format(at);

/** A text of at most 60 characters or so. */
export const shortened = (text) =>
  text.length > 60 ? `${Array.from(text.slice(0, 60)).slice(0, -1).join("")}…` : text;
