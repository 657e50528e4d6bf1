"""Trials of bad luck: a full disk, killed processes, and two processes with one output.

A disturbed command is repeated, and its result is compared with that of an undisturbed run: weights byte for byte, rows
of a study as sets. Disks are tmpfs mounts with room for a part of the output, which need root; otherwise a limit on
file sizes (RLIMIT_FSIZE) replaces them.
"""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import study_kills
from reliability_files import made
from reliability_trial import LIMIT, Ended, Outcome, Trial, dice, judged, line, started

DISK, KILLS, TWICE = "A full disk", "Killed processes", "Two processes, one output"
PLAN = """
name = "luck"
zoos.z.folder = {zoo}
[[parts]]
verb = "accuracy"
repeats = 10
[[parts]]
verb = "barrier"
repeats = 10
[[parts]]
verb = "compare"
repeats = 10
"""


@dataclass(frozen=True)
class Job:
    """A command that writes files.

    `words`: of the command line, for an output. `result`: reads what must be the same after every run.
    """

    name: str
    words: Callable[[Path], Sequence[object]]
    result: Callable[[Path], object]


def _weights(out: Path) -> object:
    manifest = json.loads((out / "manifest.json").read_text())
    records = [(r["seed"], r["sha256"], r["accuracy"]) for r in manifest["records"]]
    return records, [(out / r["file"]).read_bytes() for r in manifest["records"]]


def _rows(out: Path) -> object:
    """Read in a child process, because the threads of polars do not survive a fork."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import study_kills; "
        "from intertwine.lab.study.store import Store; "
        "print(sorted(study_kills.by_task(Store.existing(sys.argv[2]).frame()).items()))"
    )
    bench = str(Path(__file__).parent)
    done = subprocess.run([*line()[:1], "-c", script, bench, str(out)], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else done.stderr


def _bytes(out: Path, *names: str) -> object:
    return [(out / name).read_bytes() for name in names]


def jobs() -> dict[str, Job]:
    """The disturbed commands; training saves its state after every epoch."""
    zoo = made() / "zoo"
    plan = zoo.parent / "luck.toml"
    plan.write_text(PLAN.format(zoo=json.dumps(str(zoo))), encoding="utf-8")
    train = ("zoo", "train", "mlp", "--seeds", "0:2", "--epochs", 30, "--save-every", 1, "--device", "cpu")
    align = ("align", f"{zoo}:0", f"{zoo}:1")
    found = [
        Job("zoo train", lambda out: (*train, "--out", out / "zoo"), lambda out: _weights(out / "zoo")),
        Job("study run", lambda out: ("study", "run", plan, "--out", out / "study"), lambda out: _rows(out / "study")),
        Job(
            "report",
            lambda out: ("report", made() / "study", "--out", out / "r.html"),
            lambda out: _bytes(out, "r.html"),
        ),
        Job(
            "align --out",
            lambda out: (*align, "--out", out / "a.safetensors", "--element", out / "e.safetensors"),
            lambda out: _bytes(out, "a.safetensors", "e.safetensors"),
        ),
    ]
    shared = ("--executor", "processes", "--workers", 2)
    found.append(Job("study run, processes", lambda out: (*found[1].words(out), *shared), found[1].result))
    return {job.name: job for job in found}


@functools.cache
def undisturbed(name: str) -> tuple[object, float, int]:
    """The result, seconds and bytes of an undisturbed run."""
    with tempfile.TemporaryDirectory() as folder:
        job, start = jobs()[name], time.perf_counter()
        ended = started(*job.words(Path(folder)))
        assert ended.code == 0, ended.err
        seconds = time.perf_counter() - start
        return job.result(Path(folder)), seconds, sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file())


def resumed(job: Job, out: Path, said: str) -> Outcome:
    """Repeat the command; the result must be that of an undisturbed run, without unfinished files."""
    ended = started(*job.words(out))
    if ended.code != 0:
        return Outcome("could not go on", False, judged(ended).said)
    if job.result(out) != undisturbed(job.name)[0]:
        return Outcome("went on to another result", False, said)
    return Outcome("went on to the same result", True, said)


# -- full disks --------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[None]:
    """A file system of limited size; None if only file limits are available."""
    place.mkdir()
    mounted = os.geteuid() == 0 and _mount("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place))
    try:
        yield
    finally:
        if mounted:
            _mount("umount", str(place))


def _mount(*words: str) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _full(name: str, place: Path, turn: int) -> Outcome:
    job, out = jobs()[name], place / "disk"
    size = int(undisturbed(name)[2] * dice(f"disk {name}", turn).uniform(0.05, 0.95))
    with small_disk(out, size):
        limit = None if out.is_mount() else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        ended = started(*job.words(out), preexec_fn=limit)
        if ended.code == 0:
            return Outcome("had room enough", True)
        outcome = judged(ended)
        if not outcome.good:
            return outcome
        if half := [path.name for path in _finals(out) if _half(path)]:
            return Outcome(f"left {half[0]} half written", False, outcome.said)
        if out.is_mount():
            _mount("mount", "-o", "remount,size=64m", str(out))
        again = resumed(job, out, outcome.said)
        return Outcome(f"refused, then {again.kind}", again.good, outcome.said)


def _finals(out: Path) -> list[Path]:
    """Files under their final names."""
    return [path for path in out.rglob("*") if path.is_file() and not path.name.startswith(".")]


def _half(path: Path) -> bool:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt"):
                return False
        except SafetensorError:
            return True
    if path.suffix == ".html":
        return not path.read_text().rstrip().endswith("</html>")
    return path.suffix == ".json" and not path.read_text().rstrip().endswith("}")


# -- kills -------------------------------------------------------------------------------------------------------------


def _killed(name: str, place: Path, turn: int) -> Outcome:
    """SIGKILL to the command or one of its workers, at random times within the duration of an undisturbed run."""
    job, chance = jobs()[name], dice(f"kill {name}", turn)
    seconds = undisturbed(name)[1]
    kills = 0
    for _ in range(3):
        if _kill_once(job, place, chance, seconds):
            kills += 1
        if half := [path.name for path in _finals(place) if _half(path)]:
            return Outcome(f"left {half[0]} half written", False)
    outcome = resumed(job, place, "")
    return Outcome(f"{outcome.kind}", outcome.good, f"{kills} kills" if kills else "it ended before the kill")


def _kill_once(job: Job, place: Path, chance: random.Random, seconds: float) -> bool:
    """Whether a process was killed. The first 40% of the time are imports, with fewer kills."""
    process = subprocess.Popen(line(*job.words(place)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(seconds * chance.uniform(0.3, 1.0))
        return False
    except subprocess.TimeoutExpired:
        pass
    crew = [pid for pid in study_kills.descendants(process.pid) if "--multiprocessing-fork" in study_kills.command(pid)]
    victim = chance.choice(crew) if crew and chance.random() < 0.5 else process.pid
    os.kill(victim, signal.SIGKILL)
    process.wait(LIMIT)
    return True


# -- two at once -------------------------------------------------------------------------------------------------------


def _both(name: str, place: Path, turn: int) -> Outcome:
    """The same command twice in parallel: each succeeds, or reports that the other one writes there."""
    job = jobs()[name]
    running = [
        subprocess.Popen(line(*job.words(place)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ends = []
    for process in running:
        out, err = process.communicate(timeout=LIMIT)
        ends.append(Ended(process.returncode, out, err))
    outcomes = [judged(end, "done") for end in ends]
    if bad := [one for one in outcomes if not one.good]:
        return bad[0]
    kinds = " and ".join(sorted(one.kind for one in outcomes))
    if "done" not in kinds or job.result(place) != undisturbed(name)[0]:
        return Outcome(f"{kinds}, but another result", False)
    return Outcome(
        f"{kinds}, the result that of one", True, next((o.said for o in outcomes if o.kind == "refused"), "")
    )


def _reproduced(place: Path, turn: int) -> Outcome:
    words = ("reproduce", "sorensen-table1", "--scale", "cpu", "--out", place / "out")
    running = [
        subprocess.Popen(line(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outcomes = []
    for process in running:
        out, err = process.communicate(timeout=LIMIT)
        outcomes.append(judged(Ended(process.returncode, out, err), "done"))
    bad = [one for one in outcomes if not one.good]
    kinds = " and ".join(sorted(one.kind for one in outcomes))
    said = next((one.said for one in outcomes if one.kind == "refused"), "")
    return bad[0] if bad else Outcome(kinds, "done" in kinds, said)


# -- all of them -------------------------------------------------------------------------------------------------------


def trials() -> Iterator[Trial]:
    """All trials of bad luck."""
    short = {"zoo train": "train", "study run": "study", "report": "report", "align --out": "align"}
    for name, word in short.items():
        what = f"`{name}` on a disk with room for 5 to 95 % of it; then there is more, and the same command again"
        yield Trial(DISK, f"disk-{word}", what, functools.partial(_full, name), 4, True)
    for name, word in (short | {"study run, processes": "workers"}).items():
        what = f"`{name}` killed at up to three random moments, then given again"
        yield Trial(KILLS, f"kill-{word}", what, functools.partial(_killed, name), 3, True)
    for name, word in short.items():
        what = f"`{name}` twice at once"
        yield Trial(TWICE, f"twice-{word}", what, functools.partial(_both, name), 2, True)
    yield Trial(TWICE, "twice-reproduce", "`reproduce` twice at once", _reproduced, 1, True)
