// Numbers, times and names as people read them. What is not known is a dash, never a 0.

export const UNKNOWN = "–";

const PREFIXES = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
  [1, ""],
];

// What a value is multiplied with, what is written after it, and digits behind the point.
const PLAIN = {
  hertz: [1e-6, "MHz", 0],
  watts: [1, "W", 0],
  celsius: [1, "°C", 0],
  ratio: [100, "%", 0],
  lanes: [1, "lanes", 0],
  per_second: [1, "/s", 1],
};
const GIB = 2 ** 30; // what memory is counted in, here, in `gpuwatch top` and by nvidia-smi
const PREFIXED = { bytes: "B", bytes_per_second: "B/s", joules: "J", flops_per_second: "FLOP/s" };

/** Return {factor, unit, digits} for values up to `largest`. */
export function scale(unit, largest) {
  if (unit in PLAIN) {
    const [factor, text, digits] = PLAIN[unit];
    return { factor, unit: text, digits };
  }
  if (unit === "memory") {
    return { factor: 1 / GIB, unit: "GiB", digits: largest >= 100 * GIB ? 0 : 1 };
  }
  if (unit in PREFIXED) {
    const [size, prefix] = PREFIXES.find(([size]) => Math.abs(largest) >= size) ?? PREFIXES.at(-1);
    const digits = size === 1 || Math.abs(largest) / size >= 100 ? 0 : 1;
    return { factor: 1 / size, unit: prefix + PREFIXED[unit], digits };
  }
  const digits = Math.abs(largest) >= 100 || Number.isInteger(largest) ? 0 : 2;
  return { factor: 1, unit: unit === "seconds" ? "s" : "", digits };
}

/** Return a number with its unit, `1530 MHz`. */
export function quantity(value, unit) {
  if (value === null || value === undefined || Number.isNaN(value)) return UNKNOWN;
  const { factor, unit: text, digits } = scale(unit, value);
  return `${(value * factor).toFixed(digits)}${text ? `\u00a0${text}` : ""}`;
}

/** Return two numbers of one unit, `690 / 700 W`. */
export function ofLimit(value, limit, unit) {
  if (limit === null || limit === undefined) return quantity(value, unit);
  const { factor, digits } = scale(unit, limit);
  const shown = value === null || value === undefined ? UNKNOWN : (value * factor).toFixed(digits);
  return `${shown} / ${quantity(limit, unit)}`;
}

/** Return a bare number as rules have them, with three digits that count. */
export function figure(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (Math.abs(value) >= 1e6) return value.toExponential(2);
  return String(Number(value.toPrecision(3)));
}

const two = (number) => String(number).padStart(2, "0");

/** Return local time of day; with milliseconds where `step` is below a second. */
export function clock(seconds, step = 1) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  const time = new Date(Math.round(seconds * 1000));
  const text = `${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`;
  return step < 1 ? `${text}.${String(time.getMilliseconds()).padStart(3, "0")}` : text;
}

/** Return local date and time, without the date if that is today's by `now`. */
export function moment(seconds, now, step = 1) {
  const time = new Date(seconds * 1000);
  const today = new Date((now ?? 0) * 1000).toDateString() === time.toDateString();
  const date = `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())}`;
  return today ? clock(seconds, step) : `${date} ${clock(seconds, step)}`;
}

/** Return the instant in UTC, for titles. */
export function utc(seconds) {
  return `${new Date(Math.round(seconds * 1000)).toISOString().replace("T", " ").replace("Z", "")} UTC`;
}

/** Return a length of time: `250 ms`, `12.5 s`, `3 min 20 s`, `2 h 5 min`. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  if (seconds < 0.9995) return `${Number((seconds * 1000).toPrecision(3))}\u00a0ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))}\u00a0s`;
  const minutes = Math.floor(seconds / 60);
  const rest = Math.floor(seconds % 60);
  if (minutes < 60) return `${minutes}\u00a0min${rest ? ` ${rest}\u00a0s` : ""}`;
  const hours = Math.floor(minutes / 60);
  return `${hours}\u00a0h${minutes % 60 ? ` ${minutes % 60}\u00a0min` : ""}`;
}

const REASONS = {
  gpu_idle: "idle",
  applications_clocks: "application clocks",
  sw_power_cap: "power cap",
  hw_slowdown: "hardware slowdown",
  sync_boost: "sync boost",
  sw_thermal_slowdown: "thermal (driver)",
  hw_thermal_slowdown: "thermal (hardware)",
  hw_power_brake: "power brake",
  display_clocks: "display clocks",
};
const HARMLESS = new Set(["gpu_idle", "applications_clocks", "display_clocks"]);

/** Return a throttle reason in words; `harmless` ones keep a clock low by intent. */
export function reason(name) {
  return { text: REASONS[name] ?? name, harmless: HARMLESS.has(name) };
}

/** Return {stem, label} of a column's name: `gpu_clock_hertz{clock="sm"}` has the label `sm`. */
export function columnParts(name) {
  const [stem, rest] = name.split("{");
  return { stem, label: rest ? rest.slice(rest.indexOf('"') + 1, -2) : "" };
}

/** Return what an entity is called: `GPU 2`, `port mlx5_0/1`, `host`. */
export function entityName([kind, id]) {
  const words = { gpu: "GPU", rdma_port: "port", gpu_instance: "MIG instance", interface: "NIC" };
  return [words[kind] ?? kind, id].filter(Boolean).join(" ");
}
