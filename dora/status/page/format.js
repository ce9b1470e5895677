// Numbers and times as people write them.

export const count = (n) => (n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en-US"));
export const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
export const percent = (x) => (x === null || x === undefined || Number.isNaN(x) ? "–" : `${x > 0 && x < 0.01 ? "< 1" : Math.round(100 * x)} %`);

/** Three significant digits, or as many as wanted. */
export function number(x, digits = 3) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size >= 1000) return count(x);
  return size === 0 || size >= 0.001 ? String(Number(x.toPrecision(digits))) : x.toExponential(digits - 2);
}

/** Thousands and millions in short: 12.3 k, 4.56 M. */
export function short(n) {
  const size = Math.abs(n);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return `${Number((n / unit).toPrecision(3))} ${letter}`;
  }
  return number(n);
}

/** A time: 4.2 s, 1 min 5 s, 3 h 2 min, 2 d 4 h. */
export function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${Number(seconds.toFixed(1))} s`;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
  if (hours >= 24) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  if (minutes >= 10) return `${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

/** A moment on the time axis; `step`: distance of its ticks in seconds. */
export function moment(seconds, step) {
  if (step < 1) return `${seconds.toFixed(step < 0.1 ? 2 : 1)} s`;
  if (step < 60 && seconds < 600) return seconds < 60 ? `${seconds} s` : `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")} min`;
  return time(seconds).replace(/ 0 s$| 0 min$| 0 h$/, "");
}
