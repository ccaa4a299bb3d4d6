// Each GPU and each port as a row: how it is, and how far it is from its limits.

import { h, show, byId } from "./dom.js";
import { columnParts, entityName, ofLimit, quantity, reason, UNKNOWN, utc } from "./format.js";
import { causes } from "./status.js";

const SM = 'gpu_clock_hertz{clock="sm"}';
const SM_LIMIT = 'gpu_clock_limit_hertz{clock="sm"}';
const POWER_LIMIT = 'gpu_power_limit_watts{limit="enforced"}';
const threshold = (name) => `gpu_temperature_threshold_celsius{threshold="${name}"}`;
const sensor = (name) => `gpu_temperature_celsius{sensor="${name}"}`;
const cell = (title, ...content) => h("td", { "data-title": title }, content);

/** Return how a GPU is, as [class, words]. */
function stateOf(up, values) {
  if (
    Object.entries(values).some(
      ([name, value]) => columnParts(name).stem === "gpu_hung" && value === 1,
    )
  ) {
    return ["critical", "hung"];
  }
  if (up === 0) return ["critical", "lost"];
  return up === 1 ? ["ok", "up"] : ["unknown", "not known"];
}

/** Show all GPUs, and which of them `look` has chosen for the charts. */
export function showGpus(status, look) {
  byId("gpus").hidden = !status.gpus.length;
  show(
    byId("gpu-rows"),
    status.gpus.map((gpu) => row(gpu, gpu.values ?? {}, look)),
  );
}

function row(gpu, values, look) {
  const [kind, state] = stateOf(gpu.up ?? values.gpu_up, values);
  const chosen = look.isChosen(["gpu", gpu.gpu]);
  return h(
    "tr",
    {
      "data-gpu": gpu.gpu,
      class: chosen ? "chosen" : "",
      title: `${gpu.name ?? ""} ${gpu.pci_bus_id ?? ""}`.trim(),
    },
    h(
      "th",
      { scope: "row" },
      h(
        "button",
        { type: "button", class: "pick", "aria-pressed": String(chosen), "data-pick": gpu.gpu },
        look.swatch(["gpu", gpu.gpu]),
        `GPU ${gpu.gpu}`,
      ),
    ),
    cell("State", h("span", { class: `state ${kind}` }, state)),
    cell(
      "Busy",
      bar(values.gpu_utilization_ratio, 1, quantity(values.gpu_utilization_ratio, "ratio")),
    ),
    cell(
      "SM clock",
      bar(values[SM], values[SM_LIMIT], ofLimit(values[SM], values[SM_LIMIT], "hertz")),
    ),
    cell("Throttled by", reasons(values)),
    cell(
      "Power",
      bar(
        values.gpu_power_watts,
        values[POWER_LIMIT],
        ofLimit(values.gpu_power_watts, values[POWER_LIMIT], "watts"),
      ),
    ),
    cell(
      "Core",
      temperature(
        values[sensor("core")],
        values[threshold("slowdown")],
        values.gpu_temperature_margin_celsius,
      ),
    ),
    cell("Memory", temperature(values[sensor("memory")], values[threshold("memory_max")])),
    cell(
      "Memory used",
      bar(
        values.gpu_memory_used_bytes,
        values.gpu_memory_size_bytes,
        ofLimit(values.gpu_memory_used_bytes, values.gpu_memory_size_bytes, "memory"),
      ),
      (gpu.instances ?? []).map(instance),
    ),
    cell("Links", links(values)),
    cell("Xid", xids(gpu.xids)),
    cell("Why slow", causes(gpu.causes)),
  );
}

/** Return the profile and memory of a MIG instance. */
function instance({ profile, values }) {
  const used = values.gpu_instance_memory_used_bytes;
  const memory = ofLimit(used, values.gpu_instance_memory_size_bytes, "memory");
  return h("span", { class: "part" }, `${profile ?? "MIG"}: ${memory}`);
}

/** Return words over a bar that is as long as the value is of its limit. */
function bar(value, most, words) {
  const known = typeof value === "number" && most > 0;
  const share = known ? Math.min(Math.max(value / most, 0), 1) : 0;
  return h("span", { class: "bar", style: { "--share": `${(share * 100).toFixed(1)}%` } }, words);
}

function reasons(values) {
  const active = Object.entries(values)
    .filter(([name, value]) => columnParts(name).stem === "gpu_throttle_active" && value > 0)
    .map(([name]) => columnParts(name).label);
  const known = Object.keys(values).some(
    (name) => columnParts(name).stem === "gpu_throttle_active",
  );
  if (!active.length) return h("span", { class: "dim" }, known ? "nothing" : UNKNOWN);
  return active.map((name) =>
    h(
      "span",
      { class: reason(name).harmless ? "tag" : "tag warning", title: name },
      reason(name).text,
    ),
  );
}

function temperature(value, highest, margin) {
  const left = margin ?? (typeof value === "number" && highest ? highest - value : null);
  const near = left !== null && left !== undefined && left <= 5;
  const title = highest ? `limit ${quantity(highest, "celsius")}` : "";
  return h(
    "span",
    { class: near ? "near" : "", title },
    quantity(value, "celsius"),
    near ? ` (${Math.abs(Math.round(left))} ${left < 0 ? "over" : "left"})` : "",
  );
}

function links(values) {
  const generation = values.gpu_pcie_link_generation;
  const lanes = values.gpu_pcie_link_width_lanes;
  const lanesLimit = values.gpu_pcie_link_width_limit_lanes;
  const up = values.gpu_nvlink_links_up;
  const expected = values.gpu_nvlink_links_expected;
  const narrow = lanes < lanesLimit;
  return [
    lanes === undefined
      ? null
      : h(
          "span",
          { class: narrow ? "link near" : "link" },
          `PCIe ${generation ?? UNKNOWN}×${lanes}`,
          narrow ? ` of ×${lanesLimit}` : "",
        ),
    up === undefined
      ? null
      : h(
          "span",
          { class: up < expected ? "link near" : "link" },
          `NVLink ${up}${expected ? `/${expected}` : ""}`,
        ),
  ];
}

function xids(found) {
  if (!found?.length) return h("span", { class: "dim" }, found ? "none" : UNKNOWN);
  return found.map(({ xid, count, last }) =>
    h(
      "span",
      { class: "tag warning", title: last ? `last at ${utc(last)}` : "" },
      `${xid}${count > 1 ? ` ×${count}` : ""}`,
    ),
  );
}

/** Show the RDMA ports; `rates` has their bytes a second by entity, from the samples. */
export function showPorts(status, rates, look) {
  const ports = status.ports ?? [];
  byId("ports").hidden = !ports.length;
  show(
    byId("port-rows"),
    ports.map(({ device, port, gpu, values }) =>
      portRow(`${device}/${port}`, gpu, values, rates, look),
    ),
  );
}

function portRow(port, gpu, values, rates, look) {
  const entity = ["rdma_port", port];
  const up = values.rdma_port_up;
  const off = values.rdma_port_enabled === 0;
  const [kind, word] =
    up === 1 ? ["ok", "up"] : up === 0 ? ["critical", "down"] : ["unknown", "not known"];
  const rate = values.rdma_rate_bytes_per_second;
  const expected = values.rdma_expected_rate_bytes_per_second;
  const slow = rate < expected;
  const flow = (direction) => {
    const now = rates.get(`${port} ${direction}`);
    const peak = values[`rdma_burst_bytes_per_second{direction="${direction}"}`];
    return [
      bar(now, rate, quantity(now, "bytes_per_second")),
      peak === undefined
        ? null
        : h("span", { class: "dim" }, ` peak ${quantity(peak, "bytes_per_second")}`),
    ];
  };
  return h(
    "tr",
    {},
    h("th", { scope: "row", title: entityName(entity) }, look.swatch(entity), port),
    cell(
      "State",
      h("span", { class: `state ${off ? "unknown" : kind}` }, off ? "switched off" : word),
    ),
    cell("Near", gpu ? `GPU ${gpu}` : UNKNOWN),
    cell(
      "Link",
      h(
        "span",
        { class: slow ? "near" : "" },
        ofLimit(rate, slow ? expected : null, "bytes_per_second"),
      ),
    ),
    cell("Received", flow("received")),
    cell("Sent", flow("transmitted")),
  );
}
