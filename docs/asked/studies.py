"""What was asked of studies and of the commands, and what tests hold instead. Part of docs/benchmarks.py."""

from __future__ import annotations

from typing import Any

from asked.row import Asked, Held, Read, only


def _study(what: str, asked: str, name: str, bench: str, shown: str | Read, why: str = "", floor: str = "") -> Asked:
    """A row that has its bar in the file already."""

    def row(results: Any) -> dict[str, Any]:
        return only(results["rows"], what=name)

    bars = {"overhead": {"serial": 1.0, "processes": 5.0, "ray": 10.0}, "speedup": 1.8, "rows": 10.0, "kills": 0.0}
    bar: Any = bars[bench]
    return Asked(
        what, asked, f"study-{bench}", lambda r: row(r)["value"],
        bar[name.rpartition(" ")[2]] if isinstance(bar, dict) else bar, "least" if bench == "speedup" else "most",
        shown,
        beside=(lambda r: floor.format(row(r)["floor"])) if floor else None, why=why,
    )  # fmt: skip


def _killed(executor: str, kills: int) -> Asked:
    name = f"{kills} kills of studies of 200 tasks, {executor}"

    def shown(results: Any) -> str:
        row = only(results["rows"], what=name)
        return f"{row['value']} of {row['compared']:,} tasks differ; {row['starts']} starts"

    return _study(name, "results identical", name, "kills", shown)


WITH_STARTING = (
    "Workers take seconds to start (Ray about five), two as long as one, in a study of 20 to 50 s; in a longer study "
    "it is the rate from the first task on that counts."
)
PLAIN = "two plain processes {:.2f} ×"
STUDY = (
    *(_study(f"overhead of a task of 10 ms, {name}", f"< {bar} ms", f"overhead of a task of 10 ms, {name}", "overhead",
             "{:.2f} ms") for name, bar in (("serial", 1), ("processes", 5), ("ray", 10))),
    *(_study(f"two workers beside one, a study on {name}, {part}", "≥ 1.8 ×", f"study: two workers, {name}, {key}",
             "speedup", "{:.2f} ×", WITH_STARTING if key == "whole" else "", PLAIN) for name in ("processes", "ray")
      for part, key in (("from the first task on", "tasks"), ("with starting", "whole"))),
    *(_study(f"two workers beside one, a loop of pure Python on {name}", "≥ 1.8 ×", f"loop: two workers, {name}",
             "speedup", "{:.2f} ×", "Not a study: tasks of a tenth of a second, each alone. The workers were inside "
             "tasks nearly all of the time, so the loop itself ran slower beside another.", PLAIN)
      for name in ("processes", "ray")),
    *(_study(f"1,000,000 rows written, read and aggregated, {each} a task", "< 10 s",
             f"1,000,000 rows, {each} a task: written, read, aggregated", "rows", "{:.1f} s") for each in (100, 10)),
    _killed("processes", 50),
    _killed("ray", 5),
)  # fmt: skip
COMMANDS = (
    Asked(
        "`--help` of every command", "< 0.3 s", "commands", lambda r: max(row["slowest_s"] for row in r["help"]), 0.3,
        shown=lambda r: f"{max(row['slowest_s'] for row in r['help']):.2f} s at the most, {len(r['help'])} commands",
        beside=lambda r: f"Python alone {r['bare_start_s']:.2f} s",
    ),
    Asked("the demo, installed", "< 120 s on two cores", "commands", lambda r: r["demo"]["seconds"], 120.0,
          shown="{:.0f} s"),
    Asked("the report of the demo", "< 10 MB", "commands", lambda r: r["demo"]["report_mb"], 10.0, shown="{:.2f} MB"),
)  # fmt: skip

ROOMS = {"Studies": STUDY, "Commands": COMMANDS}

HELD = (
    Held("planted copies of residual perceptrons that come back", "30 of 30", "tests/align/test_planted.py"),
    *(Held(f"measures beside their oracles: {what}", "1e-6, 1e-10 in float64", f"tests/measure/test_{file}.py")
      for what, file in (("CKA and kernels", "cka"), ("CCA", "cca"), ("Procrustes", "procrustes"),
                         ("all others", "distances"))),
    Held("networks trained together beside each alone, float64", "the same to rounding",
         "tests/lab/zoo/test_trainer.py"),
    Held("`--help` of every command, time of the processor beyond an empty Python", "< 0.25 s",
         "tests/cli/test_contract.py"),
)  # fmt: skip
