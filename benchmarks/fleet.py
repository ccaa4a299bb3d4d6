"""What the pages of a fleet cost the database that scrapes them: processor, memory, disk, rules.

    python benchmarks/fleet_nodes.py record --minutes 10 pages.gz
    python benchmarks/fleet.py pages.gz --database prometheus --nodes 1 50 200 --output DIRECTORY
    python benchmarks/fleet.py pages.gz --database prometheus --nodes 10 --interval 1 --output OTHER
    python benchmarks/fleet.py pages.gz --database prometheus --nodes 50 --no-rules --output BARE

Needs `prometheus`, or `victoria-metrics`, in the PATH. Prometheus has the shipped rules loaded. For
each number of nodes an empty database scrapes them for a minute, in which all series are made, and
then for the minutes that are measured: processor time, not wall time, so that it may run beside
other work. Bytes on disk are those of Prometheus' head written as a block (a snapshot), and of
VictoriaMetrics after a forced flush and merge. The second call, with `--interval 1`, puts two hours
of scrapes each 15 s into 8 minutes: as many samples of a series as a real block of Prometheus has.
The third tells, by the difference, what the rules take.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
from fleet_nodes import load

HERE = Path(__file__).parent
RULES = HERE.parent / "grafana/prometheus/gpuwatch.rules.yml"
RACK = 8  # nodes
SETTLING_SECONDS = 60
RULES_SECONDS = 15
DATABASES = ("prometheus", "victoriametrics")
SERIES = re.compile(r"^([a-z_:0-9]+)(\{.*\})? (\S+)$", re.MULTILINE)
FITTED = ("samples_per_second", "cpu_cores", "resident_bytes", "rules_seconds")
COLUMNS = (
    *("nodes", "series", "samples_per_second", "cpu_seconds_per_million_samples"),
    *("resident_bytes", "bytes_per_sample", "rules_seconds", "scrapes_lost_ratio", "load"),
)


class Database:
    """A database that scrapes the nodes, in a directory of its own."""

    def __init__(self, arguments: argparse.Namespace, nodes: int) -> None:
        self.name, self.port = arguments.database, arguments.port
        directory = arguments.output / f"{self.name}-{nodes}"
        self.data = directory / "data"
        directory.mkdir(parents=True)
        shutil.copy(RULES, directory)
        config = directory / "scrape.yml"
        config.write_text(scrape_config(arguments, nodes))
        address = f"127.0.0.1:{self.port}"
        commands = {
            "prometheus": [
                *("prometheus", f"--config.file={config}", f"--web.listen-address={address}"),
                *(f"--storage.tsdb.path={self.data}", "--web.enable-admin-api"),
            ],
            "victoriametrics": [
                *("victoria-metrics", f"-promscrape.config={config}"),
                *(f"-httpListenAddr={address}", f"-storageDataPath={self.data}"),
            ],
        }
        with (directory / "log").open("w") as log:
            self.process = subprocess.Popen(commands[self.name], stdout=log, stderr=log)
        await_port(self.port)

    def ask(self, path: str, method: str = "GET") -> str:
        """Return the answer of a path."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.read().decode()

    def read(self) -> dict[str, float]:
        """Return what it says of itself: samples and processor time since its start, and more."""
        series = SERIES.findall(self.ask("/metrics"))

        def total(name: str, part: str = "") -> float:
            return sum(
                float(value) for key, labels, value in series if key == name and part in labels
            )

        found = {
            "seconds": time.monotonic(),
            "cpu_seconds": total("process_cpu_seconds_total"),
            "resident_bytes": total("process_resident_memory_bytes"),
        }
        if self.name == "prometheus":
            return found | {
                "samples": total("prometheus_tsdb_head_samples_appended_total"),
                "series": total("prometheus_tsdb_head_series"),
                "scrapes": total("prometheus_target_interval_length_seconds_count"),
                "rules_seconds": total("prometheus_rule_group_duration_seconds_sum"),
                "rules_missed": total("prometheus_rule_group_iterations_missed_total"),
            }
        return found | {
            "samples": total("vm_rows_inserted_total", '"promscrape"'),
            "series": total("vm_cache_entries", '"storage/hour_metric_ids"'),
            "scrapes": total("vm_promscrape_scrapes_total"),
        }

    def disk(self) -> dict[str, float]:
        """Return bytes and samples on disk, after all was written as it is kept."""
        if self.name == "prometheus":
            log = size(self.data / "wal")
            self.ask("/api/v1/admin/tsdb/snapshot", "POST")
            block = next((self.data / "snapshots").glob("*/*/meta.json")).parent
            samples = json.loads((block / "meta.json").read_text())["stats"]["numSamples"]
            parts = {"chunks": size(block / "chunks"), "index": size(block / "index")}
            return {"samples": samples, "wal": log, "bytes": sum(parts.values()), **parts}
        self.ask("/internal/force_flush")
        with suppress(TimeoutError):
            self.ask("/internal/force_merge")
        text = self.ask("/metrics")
        while re.search(r"^vm_active_force_merges [^0]", text, re.MULTILINE):
            time.sleep(1)
            text = self.ask("/metrics")
        of = {"data": 0.0, "index": 0.0, "samples": 0.0}
        for key, labels, value in SERIES.findall(text):
            kind = "index" if "indexdb" in labels else "data"
            if key == "vm_data_size_bytes":
                of[kind] += float(value)
            elif key == "vm_rows" and kind == "data":
                of["samples"] += float(value)
        return {**of, "bytes": of["data"] + of["index"]}

    def stop(self) -> None:
        """End it and remove its data."""
        self.process.terminate()
        self.process.wait(120)
        shutil.rmtree(self.data)


def scrape_config(arguments: argparse.Namespace, nodes: int) -> str:
    """Return the config; JSON is YAML, too."""
    name, interval = arguments.database, arguments.interval
    targets = [f"127.0.0.1:{arguments.port + 1 + node}" for node in range(nodes)]
    racks = [targets[first : first + RACK] for first in range(0, nodes, RACK)]
    groups = [{"targets": rack, "labels": {"rack": f"r{n}"}} for n, rack in enumerate(racks)]
    job = {"job_name": "gpuwatch", "metrics_path": f"/metrics/{name}", "static_configs": groups}
    config: dict[str, object] = {
        "global": {
            "scrape_interval": f"{interval:g}s",
            "scrape_timeout": f"{min(interval, 10):g}s",
        },
        "scrape_configs": [job],
    }
    if name == "prometheus":
        config["global"] |= {"evaluation_interval": f"{RULES_SECONDS}s"}
        config["rule_files"] = [RULES.name] if arguments.rules else []
    return json.dumps(config, indent=1)


def size(path: Path) -> int:
    """Return the bytes of a file or of all files of a directory."""
    return sum(one.stat().st_size for one in [path, *path.rglob("*")] if one.is_file())


def await_port(port: int) -> None:
    """Wait until somebody listens."""
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)


def measure(arguments: argparse.Namespace, nodes: int) -> dict[str, float]:
    """Return what a fleet of that many nodes cost."""
    with ExitStack() as stack:
        serve = [sys.executable, str(HERE / "fleet_nodes.py"), "serve", str(arguments.pages)]
        serve += ["--nodes", str(nodes), "--port", str(arguments.port + 1)]
        server = subprocess.Popen(serve)
        stack.callback(server.wait)
        stack.callback(server.terminate)
        await_port(arguments.port + nodes)
        database = Database(arguments, nodes)
        stack.callback(database.stop)
        time.sleep(SETTLING_SECONDS)
        before = database.read()
        time.sleep(arguments.minutes * 60)
        after = database.read()
        load_average = os.getloadavg()[1]
        disk = database.disk()
    spent = {name: after[name] - before[name] for name in after}
    found = {
        "nodes": nodes,
        "seconds": spent["seconds"],
        "series": after["series"],
        "samples_per_second": spent["samples"] / spent["seconds"],
        "cpu_cores": spent["cpu_seconds"] / spent["seconds"],
        "cpu_seconds_per_million_samples": spent["cpu_seconds"] / spent["samples"] * 1e6,
        "resident_bytes": after["resident_bytes"],
        "bytes_per_sample": disk["bytes"] / disk["samples"],
        "scrapes_lost_ratio": 1
        - spent["scrapes"] / (nodes * spent["seconds"] / arguments.interval),
        "load": load_average,
        "disk": disk,
    }
    if arguments.database == "prometheus":
        rounds = spent["seconds"] / RULES_SECONDS
        found["rules_seconds"] = spent["rules_seconds"] / rounds
        found["rules_missed"] = spent["rules_missed"]
    return found


def fit(runs: list[dict[str, float]]) -> dict[str, dict[str, object]]:
    """Return intercept, slope a node and residuals of each line through the runs."""
    nodes = np.array([run["nodes"] for run in runs])
    found = {}
    for name in FITTED:
        if name in runs[0]:
            values = np.array([run[name] for run in runs])
            slope, base = np.polyfit(nodes, values, 1)
            rest = (values - base - slope * nodes).tolist()
            found[name] = {"base": base, "per_node": slope, "residuals": rest}
    return found


def page(pages: list[bytes]) -> dict[str, float]:
    """Return the size of the newest page."""
    last = pages[-1]
    series = sum(not line.startswith(b"#") for line in last.splitlines())
    return {"series": series, "bytes": len(last), "gzip_bytes": len(gzip.compress(last, 1))}


def main() -> None:
    """Measure each number of nodes, print a table and write all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", type=Path)
    parser.add_argument("--database", choices=DATABASES, required=True)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 50, 200])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--interval", type=float, default=15.0, help="seconds between scrapes")
    parser.add_argument("--rules", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--port", type=int, default=21000, help="of the database; nodes follow")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    result: dict[str, object] = {"page": page(load(arguments.pages))}
    print(result["page"], " ".join(COLUMNS), sep="\n")
    runs = []
    for nodes in arguments.nodes:
        runs.append(measure(arguments, nodes))
        print(*(f"{runs[-1].get(name, float('nan')):.5g}" for name in COLUMNS), flush=True)
    result |= {"runs": runs, "fit": fit(runs) if len(runs) > 2 else {}}
    for name, line in result["fit"].items():
        print(name, line)
    (arguments.output / f"{arguments.database}.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
