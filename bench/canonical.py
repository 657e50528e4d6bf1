"""Benchmarks of canonical forms: their speed, and whether `equivalent` recovers planted elements.

    python bench/canonical.py                            # times, fingerprints and the ten Tiny-10 checkpoints
    python bench/canonical.py --planted --workers 12     # a random move and noise on every model of the catalogue
    python bench/canonical.py --page                     # print the tables of the stored results

Three questions. Is the canonical form of a wide MLP and of ResNet-50 computed within three times the time in which
numpy sorts the same weights once? Are 1,000 checkpoints of the size of Tiny-10 fingerprinted in 30 seconds? Does
`equivalent` find an element after a random move, and with relative noise of 1e-6 on top of it, on every architecture of
the coverage benchmark and on the ten real checkpoints (in $INTERTWINE_DATA/tiny10)?
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from machine import stamped, write_results

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

RESULTS = HERE / "results" / "canonical.json"
NOISE = 1e-6
#: Models whose copies need most of the memory of a small machine; they run last, a few at a time.
HEAVY = {"regnet_y_128gf", "vit_h_14", "vit_l_16", "vit_l_32", "convnext_large"}


def best(run: Callable[[], Any], repeats: int = 5) -> float:
    """The median time of a few runs, after a warm-up run."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def measure_times() -> list[dict[str, Any]]:
    """Canonical forms against one pass of numpy.sort over the same weights, in the same run."""
    import numpy as np
    import torch
    from torch import nn

    import intertwine as it
    from intertwine.checkpoints.libraries import declare_missing_ops

    declare_missing_ops()
    import torchvision

    def mlp(activation: type[nn.Module]) -> nn.Module:
        sizes = [784, 4096, 4096, 4096]
        layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), activation())]
        return nn.Sequential(*layers, nn.Linear(4096, 10))

    torch.manual_seed(0)
    image, row = torch.zeros(1, 3, 224, 224), torch.zeros(1, 784)
    cases = {
        "MLP 784-4096-4096-4096-10, ReLU": (mlp(nn.ReLU), row),
        "MLP 784-4096-4096-4096-10, GELU": (mlp(nn.GELU), row),
        "ResNet-50": (torchvision.models.resnet50().eval(), image),
    }
    rows = []
    for name, (model, x) in cases.items():
        arrays = [p.detach().numpy() for p in model.parameters()]
        start = time.perf_counter()
        sym = it.symmetry(model, x)
        found = time.perf_counter() - start
        canon = best(lambda m=model, s=sym: it.canonicalize(m, symmetry=s))
        floor = best(lambda a=arrays: [np.sort(w, axis=None) for w in a])
        twin = sym.act(sym.random(seed=1), model)
        forms = [it.canonicalize(m, symmetry=sym).model for m in (model, twin)]
        pairs = zip(forms[0].parameters(), forms[1].parameters(), strict=True)
        gap = max(float(((p - q).norm() / p.norm()).detach()) for p, q in pairs)
        rows.append(
            {"model": name, "parameters": sum(a.size for a in arrays), "symmetry_s": found, "canonical_s": canon,
             "numpy_sort_s": floor, "ratio": canon / floor, "with_symmetry": (found + canon) / floor, "orbit_gap": gap}
        )  # fmt: skip
    return rows


def measure_fingerprints(count: int = 1000) -> dict[str, Any]:
    """Fingerprints of many checkpoints of the size of Tiny-10 in one process; half of them are moved copies."""
    import torch
    from tiny10 import example_inputs, net

    import intertwine as it

    torch.manual_seed(0)
    sym = it.symmetry(net(), example_inputs())
    models = []
    for i in range(count // 2):
        model = net()
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                torch.nn.init.normal_(module.weight)
                torch.nn.init.normal_(module.bias)
        models += [model, sym.act(sym.random(seed=i), model)]
    start = time.perf_counter()
    marks = [it.fingerprint(m, symmetry=sym) for m in models]
    took = time.perf_counter() - start
    same = sum(a == b for a, b in zip(marks[::2], marks[1::2], strict=True))
    return {"checkpoints": len(models), "seconds": took, "pairs_found": same, "pairs": len(models) // 2,
            "distinct": len(set(marks))}  # fmt: skip


def measure_tiny10() -> list[dict[str, Any]]:
    """A random move, with and without noise, on each real checkpoint that is found."""
    import intertwine as it
    from intertwine.lab.papers.work import PublishedNetworks as Published
    from intertwine.lab.zoo.networks.registry import architecture

    published, x = Published("tiny10"), architecture("tiny10").example()
    models = {seed: published.seed(seed) for seed in published.files}
    return [{"name": f"seed{seed}"} | plant(model, it.symmetry(model, x)) for seed, model in models.items()]


def plant(model: Any, sym: Any) -> dict[str, Any]:
    """Move a model and recover the element, without and with noise."""
    import torch

    from intertwine.canonical.equivalence import difference, equivalent_forms
    from intertwine.canonical.form import canonical_element
    from intertwine.canonical.form import canonical_form as make_form
    from intertwine.symmetry.blocks import transform_weights as moved
    from intertwine.symmetry.blocks import weights_of

    start = time.perf_counter()
    form = make_form(sym, weights_of(sym, model))
    made = time.perf_counter() - start
    g = sym.random(seed=1)
    twin = make_form(sym, moved(sym, g, form.weights))
    row: dict[str, Any] = {
        "form_s": made,
        "doubts": list(form.doubts),
        "fingerprint": form.fingerprint() == twin.fingerprint(),
    }
    gaps = [float((form.tensors[n] - twin.tensors[n]).norm() / form.tensors[n].norm().clamp_min(1e-30))
            for n in sym.layouts if n in form.tensors and form.tensors[n].is_floating_point()]  # fmt: skip
    row["form_gap"] = max(gaps, default=0.0)
    row["idempotent"] = canonical_element(sym, form.tensors)[0].distance(sym.identity()) == 0
    found = equivalent_forms(form, twin)
    row["found"] = found is not None
    if found is not None:
        row["difference"] = difference(form, twin, found)
        row["element"] = (found @ g).distance(sym.identity())
    generator = torch.Generator().manual_seed(2)
    noisy = dict(twin.weights)
    del twin  # memory for the largest models
    for name in sym.layouts:
        if name in noisy and noisy[name].is_floating_point():
            noisy[name] = noisy[name] * (1 + NOISE * torch.randn(noisy[name].shape, generator=generator))
    start = time.perf_counter()
    found = equivalent_forms(form, make_form(sym, noisy))
    row["found_noisy"], row["noisy_s"] = found is not None, time.perf_counter() - start
    return row


def planted(source: str, name: str) -> dict[str, Any]:
    """One model of the catalogue."""
    import torch
    from catalogue import entries

    import intertwine as it
    from intertwine.errors import IntertwineError

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    entry = next(e for e in entries(source) if e.name == name)
    row: dict[str, Any] = {"source": source, "name": name, "torch": torch.__version__.split("+")[0]}
    try:
        model, args, kwargs = entry.build()
        row["parameters"] = sum(p.numel() for p in model.parameters())
        return row | plant(model, it.symmetry(model, *args, **kwargs))
    except (IntertwineError, RuntimeError, KeyError, ValueError) as error:
        return row | {"stopped": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}


def run_planted(workers: int, only: list[str], results: dict[str, Any], out: Path, again: bool) -> None:
    """Every model of the catalogue, in processes; results are stored one by one."""
    from catalogue import entries

    done = {(r["source"], r["name"]): r for r in results.get("planted", [])}
    todo = [(e.source, e.name) for e in entries() if again or (e.source, e.name) not in done]
    todo = [t for t in todo if not only or any(o in t[1] for o in only)]
    light, heavy = [t for t in todo if t[1] not in HEAVY], [t for t in todo if t[1] in HEAVY]
    for names, count in ((light, workers), (heavy, max(1, workers // 4))):
        with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
            futures = {pool.submit(planted, *name): name for name in names}
            for i, future in enumerate(as_completed(futures), 1):
                try:
                    row = future.result()
                except Exception as error:  # noqa: BLE001  (a worker that ran out of memory breaks its pool in any way)
                    row = {"source": futures[future][0], "name": futures[future][1], "stopped": repr(error)}
                done[row["source"], row["name"]] = row
                print(f"[{i}/{len(names)}] {summary(row)}", flush=True)
                results["planted"] = sorted(done.values(), key=lambda r: (r["source"], r["name"]))
                write(out, stamped(results, "planted"))


def summary(row: Mapping[str, Any]) -> str:
    if "stopped" in row:
        return f"STOPPED {row['name']}: {row['stopped']}"
    good = row["found"] and row["found_noisy"] and row["fingerprint"] and row["idempotent"]
    words = {k: row[k] for k in ("found", "found_noisy", "fingerprint", "idempotent") if not row[k]}
    text = f"{'ok ' if good else 'BAD'} {row['name']:34s} form {row['form_s']:.2f} s, gap {row['form_gap']:.1e}"
    return f"{text} {words or ''} {row['doubts'] or ''}"


def page(results: Mapping[str, Any]) -> str:
    """The tables of all results."""
    lines: list[str] = []
    if "times" in results:
        heads = ("model", "parameters", "canonical form", "numpy.sort", "ratio", "ratio with finding the symmetry")
        lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for r in results["times"]:
            times = f"{r['canonical_s']:.2f} s | {r['numpy_sort_s']:.2f} s"
            lines.append(
                f"| {r['model']} | {r['parameters']:,} | {times} | {r['ratio']:.2f} | {r['with_symmetry']:.2f} |"
            )
    if "fingerprints" in results:
        r = results["fingerprints"]
        head = f"{r['checkpoints']:,} fingerprints of Tiny-10-size networks in {r['seconds']:.1f} s"
        lines += [
            "",
            f"{head}; {r['pairs_found']} of {r['pairs']} moved pairs share theirs, {r['distinct']} are distinct.",
        ]
    for key, what in (("tiny10", "Tiny-10 checkpoints"), ("planted", "models of the coverage benchmark")):
        lines += _counts(what, results.get(key, []))
    return "\n".join(lines)


def _counts(what: str, every: list[dict[str, Any]]) -> list[str]:
    rows = [r for r in every if "stopped" not in r]
    if not rows:
        return []
    count = {k: sum(bool(r[k]) for r in rows) for k in ("found", "found_noisy", "fingerprint", "idempotent")}
    found = f"planted element found on {count['found']}, with noise on {count['found_noisy']}"
    rest = f"same fingerprint on {count['fingerprint']}; idempotent to the bit on {count['idempotent']}"
    return ["", f"{what}: {len(rows)} measured, {len(every) - len(rows)} not readable; {found}; {rest}."]


def write(path: Path, results: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_results(path, results)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--planted", action="store_true", help="measure the catalogue instead of the quick parts")
    options.add_argument("--only", default="", help="parts of names, separated by commas")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--again", action="store_true", help="repeat models that have a result")
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--page", action="store_true")
    chosen = options.parse_args()
    results = json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.exists() else {}
    if chosen.planted:
        run_planted(chosen.workers, [o for o in chosen.only.split(",") if o], results, chosen.out, chosen.again)
    elif not chosen.page:
        results["times"] = measure_times()
        results["fingerprints"] = measure_fingerprints()
        if checkpoints := measure_tiny10():
            results["tiny10"] = checkpoints
        else:
            print("no real checkpoints: set INTERTWINE_DATA to the folder that holds tiny10/")
        results = stamped(results, "quick")
        write(chosen.out, results)
    print(page(results))


if __name__ == "__main__":
    main()
