// Which charts there are. A chart shows if this node has one of its signals.

import { columnParts } from "./format.js";

const PRESSURE = 'host_pressure_seconds_total{kind="some"}';

// `signals` go up and `down` goes down from 0; with `first` only the first of them that there is.
// `limits` are names among a GPU's limits, with what they are called. `top` is where the axis ends.
const CHARTS = [
  {
    id: "clock",
    title: "SM clock",
    signals: ['gpu_clock_hertz{clock="sm"}'],
    limits: { 'gpu_clock_limit_hertz{clock="sm"}': "limit" },
    lanes: "gpu_throttle_active",
  },
  {
    id: "power",
    title: "Power",
    signals: ["gpu_power_sample_watts", "gpu_power_watts"],
    first: true,
    limits: { 'gpu_power_limit_watts{limit="enforced"}': "limit" },
  },
  {
    id: "sm",
    title: "SMs busy",
    signals: ["gpu_sm_active_ratio", "gpu_utilization_ratio"],
    first: true,
    top: 1,
  },
  { id: "tensor", title: "Tensor cores busy", signals: ["gpu_tensor_active_ratio"], top: 1 },
  {
    id: "instances",
    title: "MIG instances: SMs busy",
    signals: ["gpu_instance_sm_active_ratio"],
    top: 1,
  },
  { id: "dram", title: "Memory bandwidth used", signals: ["gpu_dram_active_ratio"], top: 1 },
  {
    id: "core",
    title: "Core temperature",
    signals: ['gpu_temperature_celsius{sensor="core"}'],
    floating: true,
    limits: {
      'gpu_temperature_threshold_celsius{threshold="slowdown"}': "slows down",
      'gpu_temperature_threshold_celsius{threshold="core_max"}': "made for",
    },
  },
  {
    id: "memory",
    title: "Memory temperature",
    signals: ['gpu_temperature_celsius{sensor="memory"}'],
    floating: true,
    limits: { 'gpu_temperature_threshold_celsius{threshold="memory_max"}': "made for" },
  },
  {
    id: "nvlink",
    title: "NVLink",
    signals: ["gpu_nvlink_received_bytes_total"],
    down: ["gpu_nvlink_transmitted_bytes_total"],
  },
  {
    id: "pcie",
    title: "PCIe",
    signals: ["gpu_pcie_received_bytes_total"],
    down: ["gpu_pcie_transmitted_bytes_total"],
  },
  {
    id: "rdma",
    title: "RDMA ports",
    signals: ["rdma_port_data_received_bytes_total"],
    down: ["rdma_port_data_transmitted_bytes_total"],
  },
  { id: "pressure", title: "Host: time that work waited for", signals: [PRESSURE] },
];

const SHOWN = new Set(
  CHARTS.flatMap((chart) => [...chart.signals, ...(chart.down ?? []), chart.lanes]),
);
const LATEST_SECONDS = 12;
const RATES = { bytes: "bytes_per_second", seconds: "ratio", joules: "watts" };

/** Return the charts of a node with these columns, each with its unit and its finest step. */
export function chartsFor(columns) {
  const known = new Map();
  for (const column of columns) {
    for (const name of [column.name, columnParts(column.name).stem]) {
      const before = known.get(name);
      const finest = Math.min(
        before?.period_seconds ?? Infinity,
        column.period_seconds || Infinity,
      );
      known.set(name, { ...column, period_seconds: finest });
    }
  }
  const found = [];
  for (const chart of CHARTS) {
    const there = chart.signals.filter((name) => known.has(name));
    if (there.length) {
      const signals = chart.first ? there.slice(0, 1) : there;
      const down = (chart.down ?? []).filter((name) => known.has(name));
      const lanes = known.has(chart.lanes) ? chart.lanes : null;
      found.push(completed({ ...chart, signals, down, lanes }, known.get(signals[0])));
    }
  }
  return found;
}

/** Return a chart of any one signal. */
export function chartOf(signal, columns) {
  const own = columns.filter((column) => columnParts(column.name).stem === signal);
  if (!own.length) return null;
  return completed(
    { id: `more-${signal}`, title: signal, signals: [signal], down: [], more: true },
    own[0],
  );
}

/** Return the signals of these columns that no chart shows by itself. */
export function otherSignals(columns) {
  const stems = new Set(
    columns
      .filter(({ name }) => !SHOWN.has(name) && !SHOWN.has(columnParts(name).stem))
      .map(({ name }) => columnParts(name).stem),
  );
  return [...stems].sort();
}

function completed(chart, column) {
  const counter = column.kind === "counter";
  const rate = RATES[column.unit] ?? "per_second";
  return {
    top: null,
    limits: {},
    ...chart,
    envelope: !counter,
    unit: counter ? rate : column.kind === "bits" ? "ratio" : column.unit,
    finest: column.period_seconds,
    // What a counter rose by is known when it is read the next time.
    late: counter ? Math.min(2 * (column.period_seconds ?? 1), LATEST_SECONDS) : 0,
  };
}
