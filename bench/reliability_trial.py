"""A reliability trial: what it does, how often, and how its outcome is judged.

A trial runs in a separate process, which may crash. Most are forked from this process after its imports: they take tens
of milliseconds and run the same `main` as the command. Trials of signals, full disks and several processes start
`python -m intertwine.cli`.
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

#: The exit code of an error with a message, as in the help of every command.
REFUSED = 2
#: Timeout of a trial in seconds.
LIMIT = 120.0
#: Stored characters of a message.
MOST = 200


@dataclass(frozen=True)
class Outcome:
    """The outcome of one turn: its kind, whether it is good, and the first line of the message."""

    kind: str
    good: bool
    said: str = ""


@dataclass(frozen=True)
class Trial:
    """One row of the page.

    Attributes:
        topic: its table on the page. name: for `--only`. what: the trial in words.
        turn: runs it once, in an empty folder, with the number of the turn. times: default number of turns.
        chance: whether it is random, so that more turns find more.
    """

    topic: str
    name: str
    what: str
    turn: Callable[[Path, int], Outcome]
    times: int = 1
    chance: bool = False


Variant = Callable[[Path], Outcome]


def each(topic: str, name: str, what: str, variants: Sequence[Variant]) -> Trial:
    """A trial with these turns."""
    return Trial(topic, name, what, lambda place, i: variants[i](place), len(variants))


def dice(trial: str, turn: int) -> random.Random:
    """The random numbers of a turn, the same in every run."""
    return random.Random(f"{trial} {turn}")


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (minus the signal that killed it) and output."""

    code: int
    out: str
    err: str


def forked(work: Callable[[], object], limit: float = LIMIT) -> Ended:
    """Call a function in a child process. Its result is the output; errors are reported as on the command line.

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
    """Run and return the exit code, without the exit handlers of the parent."""
    for number, path in ((1, out), (2, err)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(handle, number)
    code = 1
    try:
        code = _exit_code(work)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - whatever a trial raises is its outcome
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(work: Callable[[], object]) -> int:
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
    """The same command line for a separate process."""
    return [sys.executable, "-m", "intertwine.cli", *map(str, words)]


def started(*words: object, **options: Any) -> Ended:
    """A command line of intertwine as a user starts it."""
    done = subprocess.run(line(*words), capture_output=True, text=True, timeout=LIMIT, check=False, **options)
    return Ended(done.returncode, done.stdout, done.stderr)


# -- judging -----------------------------------------------------------------------------------------------------------


def judged(ended: Ended, done: str | None = None) -> Outcome:
    """An error with a message is good; so is success if `done` names it.

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
    """The first line of the message, without the name of the command."""
    lines = [one.partition("intertwine: ")[2] for one in text.splitlines() if "intertwine: " in one]
    return (lines or text.strip().splitlines() or [""])[0][:MOST]


def tried(trial: Trial, times: int | None) -> dict[str, Any]:
    """All turns of a trial, as the stored row."""
    turns = times if times is not None and trial.chance else trial.times
    outcomes = []
    for turn in range(turns):
        with tempfile.TemporaryDirectory(prefix="trial-") as folder:
            place = Path(folder)
            outcomes.append(_without(trial.turn(place, turn), place))
    return {"topic": trial.topic, "name": trial.name, "what": trial.what} | summed(outcomes)


def summed(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Turns in total: the count and an example message of each outcome, and the number of bad ones."""
    happened = Counter(one.kind for one in outcomes)
    said: Mapping[str, str] = {one.kind: one.said for one in reversed(outcomes) if one.said}
    bad = [f"{one.kind}: {one.said}" for one in outcomes if not one.good]
    return {
        "times": len(outcomes), "happened": dict(happened.most_common()), "said": dict(said), "good": not bad,
        "bad": len(bad), "examples": list(dict.fromkeys(bad))[:8],
    }  # fmt: skip


def _without(outcome: Outcome, place: Path) -> Outcome:
    """Without the name of the temporary folder."""
    return Outcome(outcome.kind, outcome.good, outcome.said.replace(f"{place}/", "").replace(str(place), "the folder"))
