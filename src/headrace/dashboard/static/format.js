// Numbers as a person reads them.

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(size < 0.1 ? 2 : 4)));
}

export function percent(value, digits = 1) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;
}

export function metric(name, value) {
  const isShare = name.endsWith("accuracy") || name.includes("fraction") || /(pass|maj)@/.test(name);
  return isShare ? percent(value) : number(value);
}

export function bytes(size) {
  if (size < 1000) return `${Math.round(size)} B`;
  const units = ["kB", "MB", "GB", "TB"];
  let place = -1;
  do { size /= 1000; place += 1; } while (size >= 999.5 && place < units.length - 1);
  return `${size.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0)} ${units[place]}`;
}

export function seconds(value) {
  if (value < 1) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const whole = Math.round(value), minutes = Math.floor(whole / 60) % 60, hours = Math.floor(whole / 3600);
  const two = (part) => String(part).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)} h` : `${minutes}:${two(whole % 60)} min`;
}

export function plural(count, noun) {
  return `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;
}

// Round values between which `count` lines of a grid stand.
export function ticks(low, high, count, whole = false) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const factor = [1, 2, 5, 10].find((candidate) => candidate * power >= raw * 0.999);
  const step = whole ? Math.max(1, Math.round(factor * power)) : factor * power;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) {
    found.push(Number((k * step).toPrecision(12)));
  }
  return found;
}
