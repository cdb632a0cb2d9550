// Write numbers for people, all in one way.

const whole = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });

export const count = (number) => whole.format(number);

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function percent(part, all) {
  if (!all) return "–";
  const value = (100 * part) / all;
  return `${value > 0 && value < 10 ? value.toFixed(1) : Math.round(value)} %`;
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${unit === 0 || number >= 100 ? Math.round(number) : number.toFixed(number >= 10 ? 1 : 2)} ${units[unit]}`;
}

export function seconds(number) {
  if (number < 1) return `${Math.round(1000 * number)} ms`;
  if (number < 60) return `${Number.isInteger(number) ? number : number.toFixed(number < 10 ? 2 : 1)} s`;
  if (number < 3600) return `${Math.floor(number / 60)} min ${Math.round(number % 60)} s`;
  if (number < 86_400) return `${Math.floor(number / 3600)} h ${Math.floor((number % 3600) / 60)} min`;
  return `${Math.floor(number / 86_400)} d ${Math.floor((number % 86_400) / 3600)} h`;
}

export function rate(tokensASecond) {
  return `${tokensASecond >= 100 ? Math.round(tokensASecond) : tokensASecond.toFixed(1)} tokens/s`;
}

export function when(milliseconds) {
  const date = new Date(milliseconds);
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday
    ? date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })
    : date.toLocaleDateString([], { day: "numeric", month: "short", year: "numeric" });
}
