"""The header that every benchmark writes with its results: machine, date, command, version.

A result file holds it under "made", once for each part of the benchmark that is run separately:

    results = stamped(results, "layers")          # results["made"]["layers"] = {"machine": …, "date": …, …}

docs/benchmarks.py reads it with `made_of`. Heavy imports are inside functions.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: The load average at the start; times on a busy machine are not reliable.
LOAD = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def header(load: float | None = None) -> dict[str, Any]:
    """Machine, date, command and versions of a run; `load` replaces the load average at the start."""
    from intertwine.lab.study.tasks import versions

    machine = {"processor": _processor(), "cores": os.cpu_count(), "gpu": _gpu()}
    return {
        "machine": machine | {"load": round(LOAD if load is None else load, 2)},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(sys.argv),
        "version": versions(),
    }


def stamped(results: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Results with the header of a part of this run.

    >>> sorted(stamped({"rows": []}, "speed")["made"]["speed"])
    ['command', 'date', 'machine', 'version']
    """
    return {**results, "made": results.get("made", {}) | {part: header()}}


def write_results(file: Path, results: Mapping[str, Any] | list[Any]) -> None:
    """Write a file of results without indentation; numbers have seven significant digits."""
    from intertwine.files import write_text

    write_text(file, json.dumps(_rounded(results), ensure_ascii=False, separators=(",", ":")) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def command(words: Iterable[str]) -> str:
    """The typed command, without the folders of this machine.

    >>> command(["/anywhere/bench/measure.py", "layers", "--peers", "/home/me/peers/bin/python"])
    'python bench/measure.py layers --peers .../python'
    """
    script, *rest = words
    return shlex.join(["python", f"bench/{Path(script).name}", *map(_without_folders, rest)])


def _without_folders(word: str) -> str:
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else f".../{path.name}"


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


# -- reading it back ---------------------------------------------------------------------------------------------------


def made_of(results: Any, part: str, gpu: bool) -> str:
    """The machine and date of a part, in words. Older results have no header, but name devices in their rows.

    >>> made_of({"speed": [{"device": "NVIDIA H200"}]}, "speed", gpu=True)
    'NVIDIA H200; date not recorded'
    >>> made_of({}, "speed", gpu=False)
    'machine and date not recorded'
    """
    headers = _headers(results, part)
    if headers:
        return _in_words(headers[-1])
    devices = sorted({d for d in _devices(results, part) if ("CPU" in d) != gpu})
    return f"{', '.join(devices)}; date not recorded" if devices else "machine and date not recorded"


def _headers(results: Any, part: str) -> list[dict[str, Any]]:
    if isinstance(results, list):  # a list of rows, each with its header
        return [row["made"] for row in results if "made" in row]
    return [results["made"][part]] if part in results.get("made", {}) else []


def _in_words(made: Mapping[str, Any]) -> str:
    where, _, rest = made_on(made).partition("; ")
    return f"{where}, load {made['machine']['load']:.1f}; {rest}"


def made_on(made: Mapping[str, Any]) -> str:
    """A header in words, without the load.

    >>> made_on({"machine": {"processor": "Z80", "cores": 1}, "date": "2026-01-01T00:00", "version":
    ...     {"version": "1.0", "torch": "2.13"}})
    'Z80, 1 cores; 2026-01-01; intertwine 1.0, torch 2.13'
    """
    machine, of = made["machine"], made["version"]
    where = ", ".join(filter(None, (machine.get("gpu"), machine["processor"], f"{machine['cores']} cores")))
    at = f"{of['version']} ({of['git']})" if of.get("git") else of["version"]
    return f"{where}; {made['date'][:10]}; intertwine {at}, torch {of['torch']}"


def _devices(results: Mapping[str, Any], part: str) -> Iterator[str]:
    """Every device named in the rows of a part, except "cuda"."""
    first = part.replace(",", "").split()[0]
    for section, rows in results.items() if isinstance(results, dict) else ():
        for row in rows if isinstance(rows, list) else ():
            of = {section, row.get("architecture"), row.get("part", "rows")}
            if (first in of or {section, row.get("part", "rows")} == {"rows"}) and " " in row.get("device", ""):
                yield row["device"]
