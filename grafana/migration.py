"""Write the tables of docs/migration.md: `python grafana/migration.py`.

They are made of what the page of DCGM's names is made of, gpuwatch/data/dcgm.toml.
"""

import tomllib
from pathlib import Path

from gpuwatch.dcgm import TABLE, Field, fields

DOCUMENT = Path(__file__).parent.parent / "docs/migration.md"
BEGIN, END = "<!-- made by grafana/migration.py: {} -->\n", "<!-- end -->\n"
# From our unit to DCGM's, as one writes it.
FACTORS = {
    1.0: "",
    1e-6: " / 1e6",
    1e3: " * 1e3",
    1e9: " * 1e9",
    100.0: " * 100",
    2.0**-20: " / 2^20",
    1 / 1024000: " / 1024e3",
}
# These are no number but a set, or a name.
OWN = {
    "gpu_throttle_active": "gpuwatch_gpu_throttle_active",
    "gpu_xid_last_timestamp_seconds": "topk by (gpu) (1, gpuwatch_gpu_xid_last_timestamp_seconds)",
}


def promql(field: Field, *, instance: bool = False) -> str:
    """Return the expression that gives a field's value from gpuwatch's own metrics."""
    columns = (field.instance,) if instance else field.columns
    if columns[0] in OWN:
        return OWN[columns[0]]
    parts = [f"gpuwatch_{column}" for column in columns]
    if field.rate:
        parts = [f"rate({part}[1m])" for part in parts]
    total = parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"
    return total + FACTORS[field.factor]


def tables() -> dict[str, str]:
    """Return the text of each table by its name in the document."""
    served = ["| DCGM | what | gpuwatch |", "|---|---|---|"]
    for field in fields():
        names = " ".join(f"`{name}`" for name in field.names)
        served.append(f"| {names} | {field.help} | `{promql(field)}` |")
    absent = ["| DCGM | gpuwatch | |", "|---|---|---|"]
    for table in tomllib.loads(TABLE.read_text())["absent"]:
        names = " ".join(f"`{name}`" for name in table["names"])
        instead = f"`{table['instead']}`" if table["instead"] else ""
        absent.append(f"| {names} | {instead} | {table['why']} |")
    return {"served": "\n".join(served) + "\n", "absent": "\n".join(absent) + "\n"}


def written(document: str) -> str:
    """Return the document with the tables as they are now."""
    for name, table in tables().items():
        before, begin, rest = document.partition(BEGIN.format(name))
        _, end, after = rest.partition(END)
        document = f"{before}{begin}\n{table}\n{end}{after}"
    return document


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
