// Formats numbers and times for display.

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const calendar = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const HALF_A_DAY_MS = 12 * 3600 * 1000;

export const NONE = "–";

export function count(number) {
  return number === null || number === undefined ? NONE : whole.format(number);
}

export function short(number) {
  return number === null || number === undefined ? NONE : compact.format(number);
}

/** A share in percent, rounded down, so that a missed goal never looks met. */
export function percent(share) {
  if (share === null || share === undefined) return NONE;
  return `${Math.floor(share * 1000 + 1e-6) / 10}%`;
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 10) return `${value.toFixed(1)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  return `${(value * 1000).toFixed(0)} ms`;
}

export function timeOfDay(epochSeconds) {
  return clock.format(new Date(epochSeconds * 1000));
}

/** The time of day, with the date if it is more than half a day ago. */
export function when(epochSeconds) {
  const time = timeOfDay(epochSeconds);
  return Date.now() - epochSeconds * 1000 < HALF_A_DAY_MS ? time : `${calendar.format(new Date(epochSeconds * 1000))} ${time}`;
}

/** The time zone of displayed times. */
export function timeZone() {
  return clock.resolvedOptions().timeZone;
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
