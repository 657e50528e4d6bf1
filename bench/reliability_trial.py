"""What a trial of reliability is: something hostile or unlucky done for real, how often, and how it is judged.

A trial runs in a process of its own, so that code which breaks the interpreter breaks that process and no other. Most
are forked from this one, behind its imports: they take tens of milliseconds, and run the same `main` as the command.
Trials of signals, full disks and several processes start `python -m intertwine.cli`.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The exit code of what was refused with a message, as the help of every command says.
REFUSED = 2
#: Seconds after which a trial is given up: nothing that is tried takes so long when it is well.
LIMIT = 120.0
#: So much is kept of what was said.
MOST = 200


@dataclass(frozen=True)
class Outcome:
    """What happened in one turn, in few words; whether that is good; and the first line that was said."""

    kind: str
    good: bool
    said: str = ""


@dataclass(frozen=True)
class Trial:
    """One row of the page.

    Attributes:
        topic: the table that it stands in. name: for `--only`. what: was tried, in words.
        turn: does it once, in an empty folder, and is told which turn it is. times: how often by default.
        chance: whether chance is involved, so that more turns say more.
    """

    topic: str
    name: str
    what: str
    turn: Callable[[Path, int], Outcome]
    times: int = 1
    chance: bool = False


Variant = Callable[[Path], Outcome]


def each(topic: str, name: str, what: str, variants: Sequence[Variant]) -> Trial:
    """A trial whose turns are these, one after the other."""
    return Trial(topic, name, what, lambda place, i: variants[i](place), len(variants))


def dice(trial: str, turn: int) -> random.Random:
    """The random numbers of a turn, the same at every run."""
    return random.Random(f"{trial} {turn}")


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (minus the signal that killed it) and what it said."""

    code: int
    out: str
    err: str


def forked(work: Callable[[], object], limit: float = LIMIT) -> Ended:
    """Do something in a child process. What it returns is its output; errors are told as the command line tells them.

    >>> forked(lambda: "well").out, forked(lambda: 1 / 0).code
    ('well', 1)
    """
    with tempfile.TemporaryDirectory() as scratch:
        out, err = Path(scratch) / "out", Path(scratch) / "err"
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _in_child(work, out, err)
        return Ended(_wait(child, limit), out.read_text(errors="replace"), err.read_text(errors="replace"))


def _in_child(work: Callable[[], object], out: Path, err: Path) -> None:
    """Run, and leave without whatever the parent has registered for its own end."""
    for number, path in ((1, out), (2, err)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(handle, number)
    code = 1
    try:
        code = _told(work)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - whatever a trial raises is its outcome
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _told(work: Callable[[], object]) -> int:
    from intertwine.errors import IntertwineError

    try:
        result = work()
    except IntertwineError as error:
        print(f"intertwine: {error}", file=sys.stderr)
        return REFUSED
    sys.stdout.write(result if isinstance(result, str) else "")
    return result if isinstance(result, int) else 0


def _wait(child: int, limit: float) -> int:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def command(*words: object) -> Ended:
    """A command line of intertwine, in a forked process."""
    from intertwine.cli import main

    return forked(lambda: main([str(word) for word in words]))


def line(*words: object) -> list[str]:
    """The same command line for a process of its own."""
    return [sys.executable, "-m", "intertwine.cli", *map(str, words)]


def started(*words: object, **options: Any) -> Ended:
    """A command line of intertwine as a user starts it."""
    done = subprocess.run(line(*words), capture_output=True, text=True, timeout=LIMIT, check=False, **options)
    return Ended(done.returncode, done.stdout, done.stderr)


# -- judging -----------------------------------------------------------------------------------------------------------


def judged(ended: Ended, done: str | None = None) -> Outcome:
    """A refusal with a message is good; so is an end without one where `done` says what that means.

    >>> judged(Ended(2, "", "intertwine: no.")).good, judged(Ended(0, "", "")).good, judged(Ended(-11, "", "")).kind
    (True, False, 'crashed (signal 11)')
    """
    said = first_line(ended.err)
    if ended.code < 0:
        return Outcome(f"crashed (signal {-ended.code})", False, said)
    if "Traceback" in ended.err:
        return Outcome("traceback", False, ended.err.strip().splitlines()[-1][:MOST])
    if ended.code == REFUSED and "intertwine: " in ended.err:
        return Outcome("refused", True, said)
    if ended.code == 0:
        return Outcome(done or "went through", done is not None)
    return Outcome(f"exit code {ended.code}", False, said)


def first_line(text: str) -> str:
    """What the command said first, without its name."""
    lines = [one.partition("intertwine: ")[2] for one in text.splitlines() if "intertwine: " in one]
    return (lines or text.strip().splitlines() or [""])[0][:MOST]


def tried(trial: Trial, times: int | None) -> dict[str, Any]:
    """All turns of a trial, as the row that is kept."""
    turns = times if times is not None and trial.chance else trial.times
    outcomes = []
    for turn in range(turns):
        with tempfile.TemporaryDirectory(prefix="trial-") as folder:
            place = Path(folder)
            outcomes.append(_without(trial.turn(place, turn), place))
    return {"topic": trial.topic, "name": trial.name, "what": trial.what} | summed(outcomes)


def summed(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Turns put together: how often which, one example of what was said for each, and whether all were good."""
    happened = Counter(one.kind for one in outcomes)
    said: Mapping[str, str] = {one.kind: one.said for one in reversed(outcomes) if one.said}
    bad = [f"{one.kind}: {one.said}" for one in outcomes if not one.good]
    return {
        "times": len(outcomes), "happened": dict(happened.most_common()), "said": dict(said), "good": not bad,
        "bad": len(bad), "examples": list(dict.fromkeys(bad))[:8],
    }  # fmt: skip


def _without(outcome: Outcome, place: Path) -> Outcome:
    """Without the name of the folder, which is another one every time."""
    return Outcome(outcome.kind, outcome.good, outcome.said.replace(f"{place}/", "").replace(str(place), "the folder"))
