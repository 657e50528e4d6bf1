"""Trials with foreign checkpoints: files that would run code, files with wrong headers, damaged files.

They are loaded into a network with one hidden layer of five units. Hostile code would write a marker file, which must
never exist afterwards.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from reliability_trial import Ended, Outcome, Trial, Variant, command, dice, each, forked, judged
from safetensors.torch import save, save_file
from torch import Tensor

TOPIC = "Checkpoints"
NET = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))

def example_inputs():
    return torch.zeros(1, 3)
"""
SHAPES = {"0.weight": (5, 3), "0.bias": (5,), "2.weight": (2, 5), "2.bias": (2,)}
LOADED = "loaded, all shapes right"


def weights() -> dict[str, Tensor]:
    """A state dict that fits."""
    return {name: torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape) for name, shape in SHAPES.items()}


def net(place: Path) -> str:
    """The file of the network, and its name on the command line."""
    file = place / "net.py"
    file.write_text(NET, encoding="utf-8")
    return f"{file}:net"


def inspected(place: Path, file: Path) -> Ended:
    """`intertwine inspect NET --weights FILE`."""
    return command("inspect", net(place), "--weights", file, "--json")


def loaded(place: Path, file: Path) -> Ended:
    """The same without the symmetry, for hundreds of turns."""
    from intertwine.checkpoints import load

    def work() -> None:
        found = load(net(place), file).model.state_dict()
        assert {name: tuple(t.shape) for name, t in found.items()} == SHAPES
        assert all(t.dtype == torch.float32 for t in found.values())

    return forked(work)


# -- code --------------------------------------------------------------------------------------------------------------


class Runs:
    """An object that calls a function when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.args


def hostile(marker: Path) -> list[Any]:
    """Objects that write a file when they are unpickled, alone and inside a plausible checkpoint."""
    code = f"open({str(marker)!r}, 'w').close()"
    ways = [
        Runs(os.system, f"touch '{marker}'"),
        Runs(eval, code),
        Runs(exec, code),
        Runs(functools.partial(open, str(marker)), "w"),
        Runs(getattr, Runs(__import__, "os"), "system"),
    ]
    nested = [lambda evil: evil, lambda evil: weights() | {"extra": evil}, lambda evil: {"state_dict": {"w": [evil]}}]
    return [wrap(evil) for evil in ways for wrap in nested]


def _code(number: int, legacy: bool, suffix: str) -> Variant:
    def variant(place: Path) -> Outcome:
        file, marker = place / f"weights{suffix}", place / "ran"
        evil = hostile(marker)[number]
        if suffix == ".pkl":
            file.write_bytes(pickle.dumps(evil))
        else:
            torch.save(evil, file, _use_new_zipfile_serialization=not legacy)
        outcome = judged(inspected(place, file))
        return Outcome("the code ran", False, outcome.said) if marker.exists() else outcome

    return variant


def _codes() -> list[Variant]:
    count = len(hostile(Path("marker")))
    forms = [(False, ".pt"), (True, ".pt"), (False, ".safetensors"), (False, ".pkl")]
    return [_code(number, legacy, suffix) for number in range(count) for legacy, suffix in forms]


# -- files that lie ----------------------------------------------------------------------------------------------------


def _header(head: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def _entry(shape: list[Any], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def lying() -> Iterator[bytes]:
    """Contents of safetensors files whose headers are wrong."""
    good = {"0.weight": _entry([5, 3], 0, 60), "0.bias": _entry([5], 60, 80)}
    for length in (0, 1, 7, 2**20, 10**8, 2**31, 2**60, 2**63, 2**64 - 1):
        yield _header(good, bytes(80), length)
    yield _header(b"{" * 1000)
    yield _header(b"[" * 100_000)
    yield _header(b"\xff" * 64)
    yield _header(b'{"a":' * 5000 + b"1" + b"}" * 5000)
    yield _header(b"null")
    yield _header([good])
    yield _header({})
    one = b'"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    yield _header(b"{" + one + b"," + one + b"}", bytes(4))
    entries = [
        _entry([5, 3], 0, 10**12), _entry([5, 3], 10**12, 10**12 + 60), _entry([5, 3], -60, 0), _entry([5, 3], 60, 0),
        _entry([2**40, 2**40], 0, 60), _entry([-5, -3], 0, 60), _entry([5.5, 3], 0, 60), _entry(["5", 3], 0, 60),
        _entry([2**64, 0], 0, 0), _entry([10**9, 10**9], 0, 4 * 10**18),
        *[_entry([5, 3], 0, 60, kind) for kind in ("F33", "", "f32", "OBJECT", "F16", "I64", "BOOL", "C64")],
    ]  # fmt: skip
    for entry in entries:
        yield _header({"0.weight": entry}, bytes(60))
    yield _header({"0.weight": _entry([5, 3], 0, 60), "0.bias": _entry([5], 40, 60)}, bytes(60))  # overlapping
    yield _header({"0.weight": _entry([5, 3], 0, 60), "0.bias": _entry([5], 80, 100)}, bytes(100))  # a gap
    yield _header(good, bytes(10_000))  # longer than declared
    yield _header(good | {"__metadata__": {"a": 1}}, bytes(80))
    yield _header({name: _entry([1], 4 * i, 4 * i + 4) for i, name in enumerate(["", "\0", "../../etc"])}, bytes(12))


def _content(content: bytes, name: str = "weights.safetensors") -> Variant:
    def variant(place: Path) -> Outcome:
        (place / name).write_bytes(content)
        return judged(inspected(place, place / name))

    return variant


def _saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def _mislabelled() -> list[Variant]:
    safe, zipped, legacy = save(weights()), _saved(weights()), _saved(weights(), _use_new_zipfile_serialization=False)
    page = b"<!DOCTYPE html><html><body>404: not found</body></html>"
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234\n"
    contents = (page, pointer, b"", b"\0" * 4096, b"PK\x03\x04", b"PK\x05\x06" + bytes(18), os.urandom(5000))
    named = [(content, name) for content in contents for name in ("w.pt", "w.safetensors", "w.bin", "w")]
    swapped = [(safe, "w.pt"), (safe, "w"), (zipped, "w.safetensors"), (legacy, "w.safetensors")]
    return [_content(content, name) for content, name in [*named, *swapped]]


# -- places that are no files ------------------------------------------------------------------------------------------


def _place(make: Callable[[Path], object], suffix: str) -> Variant:
    def variant(place: Path) -> Outcome:
        file = place / f"weights{suffix}"
        make(file)
        return judged(inspected(place, file))

    return variant


def _unreadable(suffix: str) -> Variant:
    def variant(place: Path) -> Outcome:
        """As the user nobody if the program runs as root, who may read everything."""
        file = place / f"weights{suffix}"
        save_file(weights(), file) if suffix == ".safetensors" else torch.save(weights(), file)
        name = net(place)
        file.chmod(0)
        place.chmod(stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)

        def work() -> int:
            from intertwine.cli import main

            if os.getuid() == 0:
                os.setuid(65534)
            return main(["inspect", name, "--weights", str(file), "--json"])

        return judged(forked(work))

    return variant


def _no_files() -> list[Variant]:
    ways = [Path.mkdir, lambda file: file.symlink_to(file), lambda file: os.mkfifo(file), lambda file: None]
    ways.append(lambda file: file.symlink_to("/dev/zero"))
    both = (".pt", ".safetensors")
    return [_place(make, suffix) for make in ways for suffix in both] + [_unreadable(suffix) for suffix in both]


# -- tensors that do not fit -------------------------------------------------------------------------------------------


def _unfit() -> list[Variant]:
    fits = weights()
    huge = torch.zeros(1).expand(10**12)
    states: list[Any] = [
        fits | {"0.weight": torch.zeros(3, 5)}, fits | {"0.weight": torch.zeros(5, 3, 1)}, fits | {"more": huge},
        {name: t for name, t in fits.items() if name != "2.bias"}, fits | {"2.bias": torch.tensor(1.0)},
        fits | {"0.bias": torch.zeros(5, dtype=torch.complex64)}, fits | {"0.bias": huge}, {}, [], 5, "text", None,
        fits | {"0.bias": torch.zeros(5, device="meta")}, fits | {"0.bias": torch.zeros(5).to_sparse()},
        fits | {"0.bias": torch.quantize_per_tensor(torch.zeros(5), 0.1, 0, torch.qint8)},
        fits | {"0.bias": torch.zeros(0)}, fits | {"0.bias": [0.0] * 5}, {1: torch.zeros(5)}, list(fits.values()),
        {"state_dict": {"state_dict": {"state_dict": {}}}}, fits | {"0.bias": torch.zeros(5, dtype=torch.bool)},
        fits | {"0.bias": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])},
    ]  # fmt: skip
    return [_content(_saved(state), "weights.pt") for state in states]


def _not_finite() -> list[Variant]:
    def variant(place: Path, name: str, value: float) -> Outcome:
        state = weights()
        state[name].view(-1)[0] = value
        save_file(state, place / "weights.safetensors")
        ended = inspected(place, place / "weights.safetensors")
        return judged(ended, "certified: equal outputs stay equal" if value == value else None)

    values = (float("nan"), float("inf"), float("-inf"))
    return [functools.partial(variant, name=name, value=value) for name in SHAPES for value in values]


def _bombs() -> list[Variant]:
    """Zip files that would unpack to more than the memory of the machine, with replaced first entries."""

    def bomb(place: Path, name: str) -> Outcome:
        file = place / "weights.pt"
        with zipfile.ZipFile(io.BytesIO(_saved(weights()))) as good:
            entries = {entry: good.read(entry) for entry in good.namelist()}
        with zipfile.ZipFile(file, "w") as bad:
            for entry, content in entries.items():
                if entry.endswith(name):
                    _write_bomb(bad, entry, gigabytes=64)
                else:
                    bad.writestr(entry, content)
        return judged(inspected(place, file))

    return [functools.partial(bomb, name=name) for name in ("/data.pkl", "/data/0")]


def _write_bomb(packed: zipfile.ZipFile, entry: str, gigabytes: int) -> None:
    """An entry of zeros that is compressed a thousandfold: one packed block, repeated."""
    packer, piece = zlib.compressobj(9, zlib.DEFLATED, -15), bytes(2**24)
    once = packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)
    about = zipfile.ZipInfo(entry)
    with packed.open(about, "w", force_zip64=True) as out:
        for _ in range(64 * gigabytes):
            out.write(once)
        out.write(packer.flush(zlib.Z_FINISH))
    about.compress_type, about.file_size = zipfile.ZIP_DEFLATED, gigabytes << 30


# -- files that broke --------------------------------------------------------------------------------------------------


def _cut(kind: str) -> Callable[[Path, int], Outcome]:
    def turn(place: Path, number: int) -> Outcome:
        content = _forms()[kind]
        cut = dice(f"cut {kind}", number).randrange(len(content))
        file = place / f"weights{'.safetensors' if kind == 'safetensors' else '.pt'}"
        file.write_bytes(content[:cut])
        return judged(loaded(place, file))

    return turn


def _flipped(kind: str) -> Callable[[Path, int], Outcome]:
    def turn(place: Path, number: int) -> Outcome:
        content, chance = bytearray(_forms()[kind]), dice(f"flip {kind}", number)
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file = place / f"weights{'.safetensors' if kind == 'safetensors' else '.pt'}"
        file.write_bytes(content)
        return judged(loaded(place, file), LOADED)

    return turn


@functools.cache
def _forms() -> dict[str, bytes]:
    legacy = _saved(weights(), _use_new_zipfile_serialization=False)
    return {"safetensors": save(weights()), "zip": _saved(weights()), "legacy": legacy}


# -- all of them -------------------------------------------------------------------------------------------------------


def trials() -> Iterator[Trial]:
    """All trials with checkpoints."""
    codes = (
        "pickles that call os.system, eval, exec, open or getattr(os, …) when they are read: alone, as one entry of "
        "a state dict, nested in it; as zip, as legacy file, as plain pickle, and named .safetensors"
    )
    yield each(TOPIC, "code", codes, _codes())
    yield each(
        TOPIC,
        "mislabelled",
        "other things under the name of a checkpoint: a web page, a git-lfs pointer, zeros, noise, an empty file, "
        "half a zip; safetensors named .pt, torch files named .safetensors",
        _mislabelled(),
    )
    yield each(
        TOPIC,
        "no-files",
        "a folder, a link to itself, a pipe, a link to /dev/zero, nothing, a file without rights, in place of the file",
        _no_files(),
    )
    yield each(
        TOPIC,
        "headers",
        "safetensors with wrong headers: lengths up to 2⁶⁴, offsets outside, overlapping, negative or with gaps, "
        "names twice, unknown types, deep nesting, shapes that overflow",
        [_content(content) for content in lying()],
    )
    yield each(
        TOPIC,
        "unfit",
        "tensors of other shapes, missing, too many, complex, quantised, sparse, nested, on the meta device, 10¹² "
        "numbers in four bytes; no tensors",
        _unfit(),
    )
    yield each(TOPIC, "not-finite", "NaN, inf and −inf in one weight, through `inspect`", _not_finite())
    yield each(TOPIC, "bombs", "zip files that unpack to a thousand times their size", _bombs())
    for kind in _forms():
        yield Trial(TOPIC, f"cut-{kind}", f"a {kind} file cut at a random byte", _cut(kind), 60, True)
        yield Trial(
            TOPIC,
            f"flip-{kind}",
            f"a {kind} file with one random bit turned over",
            _flipped(kind),
            {"safetensors": 500}.get(kind, 150),
            True,
        )
