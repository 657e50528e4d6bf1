"""Trials with damaged files of intertwine: elements, zoos, plans, studies, folded networks, results of experiments.

Each file is written once by intertwine, then a copy of it is damaged."""

from __future__ import annotations

import functools
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from reliability_trial import Ended, Outcome, Trial, Variant, command, dice, each, forked, judged
from safetensors.torch import load_file, save_file
from torch import nn

TOPIC = "Files of its own"
#: Replacements of a value in JSON or TOML.
ODD: tuple[Any, ...] = (None, -1, 1.5, "x", [], {}, True, [[]], {"x": 1})


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # deleted when this process ends


@functools.cache
def made() -> Path:
    """One of each kind of file, in a folder: `zoo`, `study`, `element.safetensors`, `folded`."""
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="made-"))
    place = Path(_FOLDERS[-1].name)
    ended = forked(lambda: _make(place))  # polars must not be loaded here: its threads do not survive a fork
    assert ended.code == 0, ended.err
    return place


def _make(place: Path) -> None:
    import intertwine as it
    from intertwine.fold.result import save_folded

    it.zoo.train("mlp", seeds=range(2), data="digits", out=place / "zoo", options={"widths": (64, 8, 10)}, epochs=1)
    it.study.run(plan(place / "zoo"), out=place / "study")
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    it.symmetry(model, torch.zeros(1, 3)).random(seed=0).save(place / "element.safetensors")
    network = it.zoo.load(place / "zoo")[0]
    save_folded(place / "folded", it.fold(network, torch.zeros(1, 1, 8, 8), beta=0.5), f"{place}/zoo:0")


def plan(zoo: Path) -> dict[str, Any]:
    """A small study of two networks."""
    return {
        "name": "small", "zoos": {"z": {"folder": str(zoo)}},
        "parts": [{"verb": "accuracy", "zoos": ["z"]}, {"verb": "compare", "zoos": ["z"], "pairs": [[0, 1]]}],
    }  # fmt: skip


def copied(place: Path, name: str) -> Path:
    """A copy of one of the files, to damage."""
    source, target = made() / name, place / name
    return Path(shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target))


def spoilt(content: bytes, chance: random.Random) -> bytes:
    """A damaged file: truncated, with a flipped bit or a block of zeros, or with other contents."""
    at = chance.randrange(len(content))
    way = chance.randrange(4)
    if way == 0:
        return content[:at]
    if way == 1:
        return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
    if way == 2:
        return content[:at] + bytes(min(64, len(content) - at)) + content[at + 64 :]
    return chance.randbytes(at)


# -- elements ----------------------------------------------------------------------------------------------------------


def _element(place: Path, spoil: Callable[[Path], object]) -> Outcome:
    """Load an element and act with it: it is refused, or it is an element of the group and keeps the function."""
    import intertwine as it

    file = copied(place, "element.safetensors")
    spoil(file)

    def work() -> None:
        model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        symmetry = it.symmetry(model, torch.zeros(1, 3))
        moved = symmetry.act(it.Element.load(file), model)
        x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(moved(x), model(x), atol=1e-4), "the moved network is another function"

    return judged(forked(work), "loaded, and the moved network is the same function")


def _element_bytes(place: Path, turn: int) -> Outcome:
    return _element(place, lambda file: file.write_bytes(spoilt(file.read_bytes(), dice("element", turn))))


def _element_contents() -> list[Variant]:
    """Well-formed files that are not elements of the group."""

    def rewritten(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Callable[[Path], None]:
        def spoil(file: Path) -> None:
            from safetensors import safe_open

            with safe_open(file, "pt") as opened:
                head = json.loads(opened.metadata()["about"])
            tensors = load_file(file)
            change(tensors, head)
            save_file(tensors, file, {"about": json.dumps(head)})

        return spoil

    def into(name: str, value: Any) -> Callable[[Path], None]:
        return rewritten(lambda tensors, head: tensors.__setitem__(name, value))

    def head(name: str, value: Any) -> Callable[[Path], None]:
        return rewritten(lambda tensors, head: head.pop(name) if value is None else head.__setitem__(name, value))

    ways = [
        into("0.permutation", torch.zeros(8, dtype=torch.int64)), into("0.permutation", torch.arange(8) + 1),
        into("0.permutation", torch.arange(5)), into("0.permutation", torch.arange(8).float()),
        into("0.scale", -torch.ones(1, 8, dtype=torch.float64)),
        into("0.scale", torch.zeros(1, 8, dtype=torch.float64)),
        into("0.scale", torch.full((1, 8), float("nan"), dtype=torch.float64)),
        into("0.scale", torch.ones(1, 9, dtype=torch.float64)), into("0.sign", torch.ones(1, 8, dtype=torch.float64)),
        into("0.nothing", torch.ones(8)), into("nothing", torch.ones(8)), into("7.permutation", torch.arange(8)),
        rewritten(lambda tensors, head: tensors.pop("0.permutation")), rewritten(lambda tensors, head: tensors.clear()),
        head("signature", None), head("signature", "x"), head("strands", []), head("strands", "{"),
        head("strands", [1]), head("strands", [{"name": 1}]), head("strands", None), head("sha256", None), Path.unlink,
        lambda file: (file.unlink(), file.mkdir()),
    ]  # fmt: skip
    return [functools.partial(_element, spoil=way) for way in ways]


# -- zoos --------------------------------------------------------------------------------------------------------------


def _zoo(place: Path, spoil: Callable[[Path], object]) -> Outcome:
    zoo = copied(place, "zoo")
    spoil(zoo)
    outcomes = [
        judged(command("zoo", "evaluate", zoo, "--device", "cpu", "--json"), "evaluated"),
        judged(command("barrier", f"{zoo}:0", f"{zoo}:1", "--data", "digits", "--points", 3, "--json"), "evaluated"),
    ]
    return next((one for one in outcomes if not one.good), outcomes[0])


def _manifests() -> list[Variant]:
    def changed(zoo: Path, path: tuple[Any, ...], value: Any) -> None:
        manifest = json.loads((zoo / "manifest.json").read_text())
        at = manifest
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value
        (zoo / "manifest.json").write_text(json.dumps(manifest))

    def variant(place: Path, path: tuple[Any, ...], value: Any) -> Outcome:
        return _zoo(place, functools.partial(changed, path=path, value=value))

    paths: list[tuple[Any, ...]] = [
        ("format",), ("plan",), ("records",), ("plan", "architecture"), ("plan", "architecture", "name"),
        ("plan", "architecture", "options"), ("plan", "data", "mean"), ("plan", "data", "name"),
        ("plan", "data", "shape"), ("plan", "precision"), ("records", 0), ("records", 0, "seed"),
        ("records", 0, "file"), ("records", 0, "sha256"), ("records", 0, "accuracy"),
    ]  # fmt: skip
    values: tuple[Any, ...] = (None, 7, "x", [], {}, ["x"])
    return [functools.partial(variant, path=path, value=value) for path in paths for value in values]


def _zoo_files() -> list[Variant]:
    def swap(zoo: Path) -> None:
        one, two, aside = zoo / "seed0.safetensors", zoo / "seed1.safetensors", zoo / "aside"
        one.rename(aside), two.rename(one), aside.rename(two)

    def escape(zoo: Path) -> None:
        text = (zoo / "manifest.json").read_text().replace('"seed0.safetensors"', '"../../../../etc/hostname"')
        (zoo / "manifest.json").write_text(text)

    ways: list[Callable[[Path], object]] = [
        swap, escape, lambda zoo: (zoo / "manifest.json").unlink(), lambda zoo: (zoo / "seed0.safetensors").unlink(),
        lambda zoo: (zoo / "manifest.json").write_text("{"),
        lambda zoo: (zoo / "manifest.json").write_bytes(b"\xff\xfe"),
        lambda zoo: (zoo / "seed0.safetensors").write_bytes(b""),
        *(functools.partial(_into_a_folder, name=name) for name in ("seed0.safetensors", "manifest.json")),
    ]  # fmt: skip
    return [functools.partial(_zoo, spoil=way) for way in ways]


def _into_a_folder(zoo: Path, name: str) -> None:
    (zoo / name).unlink()
    (zoo / name).mkdir()


def _zoo_bytes(place: Path, turn: int) -> Outcome:
    chance = dice("zoo", turn)
    name = chance.choice(("manifest.json", "seed0.safetensors"))
    return _zoo(place, lambda zoo: (zoo / name).write_bytes(spoilt((zoo / name).read_bytes(), chance)))


# -- plans of studies --------------------------------------------------------------------------------------------------


def _study(place: Path, text: str | bytes) -> Outcome:
    file = place / "plan.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return judged(command("study", "run", file, "--out", place / "out", "--json"), "ran")


def _plan_values() -> list[Variant]:
    """Every field of a plan with every odd value."""
    trained = {"architecture": "mlp", "data": "digits", "seeds": "0:2", "epochs": 1}
    fields = {
        "": ("name", "zoos", "parts"),
        "zoos.z": (
            "folder", "architecture", "data", "seeds", "recipe", "options", "changes", "epochs", "batch", "rate",
            "spawn",
        ),
        "parts": ("verb", "zoos", "networks", "pairs", "layers", "options", "grid", "repeats"),
    }  # fmt: skip

    def variant(place: Path, table: str, key: str, value: Any) -> Outcome:
        import intertwine as it

        data = plan(made() / "zoo")
        if table == "zoos.z" and key != "folder":
            data["zoos"]["z"] = dict(trained)
        at = {"": data, "zoos.z": data["zoos"]["z"], "parts": data["parts"][1]}[table]
        at[key] = value
        return judged(forked(lambda: _ran(it.study.run(data, out=place / "out"))), "ran")

    return [
        functools.partial(variant, table=table, key=key, value=value)
        for table, keys in fields.items()
        for key in keys
        for value in ODD
    ]


def _ran(study: Any) -> None:
    """A finished study without failed tasks; a study that reports its failed tasks is good too."""
    assert study.tasks == study.run


def _plan_texts() -> list[Variant]:
    zoo = f'[zoos.z]\nfolder = "{made() / "zoo"}"\n'
    head = f'name = "p"\n{zoo}'
    part = f"{head}[[parts]]\n"

    def trained(architecture: str = "mlp", data: str = "digits", seeds: str = "0:2") -> str:
        of = f'architecture = "{architecture}"\ndata = "{data}"\nseeds = "{seeds}"\n'
        return f'name = "p"\n[zoos.z]\n{of}[[parts]]\nverb = "accuracy"\n'

    grid = ", ".join(f"o{i} = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" for i in range(30))
    texts: list[str | bytes] = [
        "", "name", "name = ", '[[parts]\nverb = "x"', "\0", b"\xff\xfe\xfa", '{"name": "json"}', "name = 1\nname = 2",
        'name = "p"', head, f'{part}verb = "nothing"\n', f'{part}verb = "barier"\n', f'{part}verbs = "fold"\n',
        f'{head}[parts]\nverb = "accuracy"\n', f'{part}verb = "accuracy"\nzoos = ["y"]\n',
        f'{part}verb = "accuracy"\nzoos = []\n', f'{part}verb = "accuracy"\nnetworks = [99]\n',
        f'{part}verb = "barrier"\npairs = [[0, 0]]\n', f'{part}verb = "barrier"\npairs = [[0, 9]]\n',
        f'{part}verb = "compare"\nlayers = ["nowhere"]\n', f'{part}verb = "accuracy"\nrepeats = 0\n',
        f'{part}verb = "accuracy"\nrepeats = 1000000000000\n', f'{part}verb = "accuracy"\ngrid = {{ {grid} }}\n',
        f'{part}verb = "compare"\ngrid = {{ measure = ["nothing"] }}\n',
        'name = "p"\n[zoos.z]\nfolder = "nowhere"\n[[parts]]\nverb = "accuracy"\n',
        trained(architecture="nothing"), trained(data="nothing"), trained(seeds="2:0"), trained(seeds="0:9999999999"),
        "a = " + "[" * 100_000, 'name = "p"\n[zoos.z]\nfolder = "."\n[[parts]]\nverb = "accuracy"\n',
    ]  # fmt: skip
    return [functools.partial(_study, text=text) for text in texts]


# -- folders of studies ------------------------------------------------------------------------------------------------


def _study_folder(place: Path, spoil: Callable[[Path], object]) -> Outcome:
    """Damage a finished study, then write its report and resume it."""
    study = copied(place, "study")
    spoil(study)
    file = place / "plan.json"
    file.write_text(json.dumps(plan(made() / "zoo")))

    def again() -> None:
        import intertwine as it

        found = it.study.run(json.loads(file.read_text()), out=study)
        whole = it.study.run(plan(made() / "zoo"), out=made() / "study")
        assert found.frame().height == whole.frame().height, "rows are missing, or there are too many"

    outcomes = [judged(command("report", study, "--out", place / "r.html"), "read"), judged(forked(again), "read")]
    return next((one for one in outcomes if not one.good), outcomes[-1])


def _study_bytes(place: Path, turn: int) -> Outcome:
    def spoil(study: Path) -> None:
        chance = dice("study", turn)
        file = chance.choice([study / "plan.json", *study.glob("shards/*")])
        file.write_bytes(spoilt(file.read_bytes(), chance))

    return _study_folder(place, spoil)


def _study_files() -> list[Variant]:
    def add(name: str, content: bytes) -> Callable[[Path], object]:
        return lambda study: (study / name).write_bytes(content)

    ways: list[Callable[[Path], object]] = [
        add("journals/20200101T000000000000-a.jsonl", b'{"crc":"00000000","ok":true,"key":"half'),
        add("journals/20200101T000000000000-a.jsonl", b"\xff\n\n{}\n[]\nnull\n"), add("journals/x.jsonl", b""),
        add("journals/notes.txt", b"hello"), add("shards/notes.txt", b"hello"), add("shards/x.parquet", b""),
        add("shards/x.parquet", b"PAR1"), add("shards/.x.parquet.part", b"half"), add("plan.json", b"{}"),
        add("plan.json", b"null"), add("plan.json", b'{"format": 9, "study": "s", "plan": {}, "hash": "h"}'),
        lambda study: (study / "plan.json").unlink(), lambda study: shutil.rmtree(study / "shards"),
        lambda study: shutil.rmtree(study / "journals"), _other_plan, _edited_plan, _other_columns,
    ]  # fmt: skip
    return [functools.partial(_study_folder, spoil=way) for way in ways]


def _other_plan(study: Path) -> None:
    from intertwine.lab.study.store import identity

    other = identity("other", {"name": "other", "zoos": {"z": {"folder": "zoo"}}, "parts": [{"verb": "accuracy"}]})
    about = {"format": 1, "study": other.study, "hash": other.hash, "plan": other.plan}
    (study / "plan.json").write_text(json.dumps(about))


def _edited_plan(study: Path) -> None:
    text = (study / "plan.json").read_text()
    (study / "plan.json").write_text(text.replace('"accuracy"', '"symmetry"'))


def _other_columns(study: Path) -> None:
    """In a child process, as in `made`."""

    def work() -> None:
        import polars as pl

        for file in study.glob("shards/*.parquet"):
            pl.read_parquet(file).with_columns(value=pl.lit("text"), repeat=pl.lit("text")).write_parquet(file)

    ended = forked(work)
    assert ended.code == 0, ended.err


# -- folded networks, results of experiments ---------------------------------------------------------------------------


def _folded(place: Path, turn: int) -> Outcome:
    from intertwine.fold.result import load_folded

    chance, folder = dice("folded", turn), copied(place, "folded")
    file = chance.choice(sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors")))
    file.write_bytes(spoilt(file.read_bytes(), chance))
    return judged(forked(lambda: load_folded(folder) and None), "loaded")


def _result(place: Path, turn: int) -> Outcome:
    chance = dice("result", turn)
    whole = next((Path(__file__).parents[1] / "experiments" / "results").glob("godfrey-fig3*.json"))
    file = place / "result.json"
    file.write_bytes(spoilt(whole.read_bytes(), chance))
    ended: Ended = command("reproduce", "--draw", file, "--plot", place / "figure.svg", "--json")
    return judged(ended, "drawn")


def trials() -> Iterator[Trial]:
    """All trials with damaged files."""
    accident = "cut short, one bit turned over, a stretch of zeros, or noise instead"
    yield each(
        TOPIC,
        "element-contents",
        "`Element.load` and `act`: permutations that are none, scales ≤ 0 or NaN, parts of other shapes, unknown, "
        "missing; wrong or no metadata; no file",
        _element_contents(),
    )
    yield Trial(TOPIC, "element-bytes", f"the file of an element, {accident}", _element_bytes, 60, True)
    yield each(
        TOPIC,
        "zoo-files",
        "a zoo whose weights are swapped between seeds, gone or empty, or point outside the folder; whose manifest "
        "is gone, garbled or a folder",
        _zoo_files(),
    )
    yield each(TOPIC, "zoo-manifest", "a manifest with every field of a wrong kind", _manifests())
    yield Trial(TOPIC, "zoo-bytes", f"the manifest or the weights of a zoo, {accident}", _zoo_bytes, 40, True)
    yield each(
        TOPIC,
        "plan-texts",
        "plans of studies that are no TOML, lack parts, name unknown verbs, zoos, networks or layers, or are too large",
        _plan_texts(),
    )
    yield each(TOPIC, "plan-values", "plans of studies with every field of a wrong kind", _plan_values())
    yield each(
        TOPIC,
        "study-files",
        "folders of studies: half a line in a journal, foreign files, shards that are none or have other columns, no "
        "plan, another plan, an edited plan",
        _study_files(),
    )
    yield Trial(TOPIC, "study-bytes", f"the plan or a shard of a study, {accident}", _study_bytes, 40, True)
    yield Trial(TOPIC, "folded-bytes", f"a folded network, {accident}", _folded, 40, True)
    yield Trial(TOPIC, "result-bytes", f"the result of an experiment, {accident}, drawn again", _result, 30, True)
