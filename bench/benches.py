"""The list of all benchmarks: command, requirements, duration and result file of each.

`bench/all.py` runs the list in order, and docs/benchmarks.py prints its commands. Minutes are rough, for two CPU cores
or one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The folder of trained networks, shared by the benchmarks.
ZOOS = "scratch/zoos"
MNIST = "align.py quality mlp --data mnist --option widths=[784,512,512,512,10] --llfc 1000 --device cpu"
CURVES = "--again --seen 2000 --shares 0.5,0.4,0.3,0.25,0.2,0.15,0.1"
SHORT = "--recipe fast --epochs 10 --pairs 1 --seen 5000"


@dataclass(frozen=True)
class Bench:
    """One benchmark.

    Attributes:
        name: for `bench/all.py --only`. words: its command after `python bench/`, with PEERS for the interpreter with
            the peers. minutes: its approximate duration. file: its result file in bench/results. part: the name of
            this run among the headers in that file (bench/machine.py).
        needs: its requirements: "gpu", "data" (the folder INTERTWINE_DATA) or "peers".
    """

    name: str
    words: str
    minutes: float
    file: str
    part: str
    needs: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command as it is typed.

        >>> Bench("speed", "align.py speed --peers PEERS", 3, "align.json", "speed").command
        'python bench/align.py speed --peers PEERS'
        """
        return f"python bench/{self.words}"


ON_A_CPU = (
    Bench("rotation", "inspection.py rotation", 0.5, "inspection.json", "rotation"),
    Bench("discovery", "discovery.py", 1, "discovery.json", "discovery"),
    Bench("study-overhead", "study.py overhead", 1, "study.json", "overhead"),
    Bench("study-rows", "study.py rows", 1, "study.json", "rows"),
    Bench("dissect", "inspection.py dissect", 2, "inspection.json", "dissect"),
    Bench("commands", "commands.py", 2, "commands.json", "commands"),
    Bench("zoo-cpu", "zoo.py cpu", 2, "zoo.json", "cpu"),
    Bench("canonical", "canonical.py", 2, "canonical.json", "quick", ("data",)),
    Bench("fold-speed", "fold.py speed", 2, "fold.json", "speed"),
    Bench("measure", "measure.py --peers PEERS", 2, "measure.json", "pairs", ("peers",)),
    Bench("align-speed", "align.py speed --peers PEERS", 3, "align.json", "speed", ("peers",)),
    Bench(
        "measure-validation", "measure_validation.py --skip soft_matching", 5, "measure_validation.json", "validation"
    ),
    Bench("stitch-moved", "stitch.py moved", 5, "stitch.json", "moved"),
    Bench("stitch-direct", "stitch.py direct", 6, "stitch.json", "direct", ("data",)),
    Bench("fuzz", "fuzz.py --cases 2000 --seed 0 --out bench/results/fuzz.json", 7, "fuzz.json", "fuzz"),
    Bench("align-planted", "align.py planted --elements 5", 12, "align.json", "planted", ("data",)),
    Bench(
        "align-mnist", f"{MNIST} --seeds 0:8 --zoo {ZOOS}/mnist", 15, "align.json",
        "mlp widths=[784,512,512,512,10]", ("data",),
    ),
    Bench(
        "align-mnist-rescaled", f"{MNIST} --seeds 0:8 --zoo {ZOOS}/mnist --rescaled", 15, "align.json",
        "mlp widths=[784,512,512,512,10], second with unit lengths", ("data",),
    ),
    Bench(
        "stitch-cka", "stitch.py cka --pairs 5 --train 3000 --test 1000 --device cpu", 15, "stitch.json", "cka",
        ("data",),
    ),
    Bench("measure-layers", "measure.py layers --peers PEERS", 16, "measure.json", "layers", ("data", "peers")),
    Bench("study-speedup", "study.py speedup", 6, "study.json", "speedup"),
    Bench("study-kills", "study.py kills", 12, "study.json", "kills"),
    Bench(
        "align-tiny10", "align.py tiny10 --pairs 3 --points 5 --test 2000 --seen 1000 --device cpu", 30, "align.json",
        "tiny10 published", ("data",),
    ),
    Bench("canonical-planted", "canonical.py --planted --again", 60, "canonical.json", "planted"),
    Bench("coverage", "coverage.py --again", 90, "coverage.json", "coverage"),
)  # fmt: skip

ON_A_GPU = (
    Bench("measure-gpu", "measure_gpu.py", 1, "measure_gpu.json", "gpu", ("gpu",)),
    Bench("zoo-speed", "zoo.py speed", 2, "zoo.json", "speed", ("gpu",)),
    Bench("gpu", "gpu.py", 3, "gpu.json", "gpu", ("gpu",)),
    Bench("zoo-kernels", "zoo.py kernels", 1, "zoo.json", "kernels", ("gpu",)),
    Bench(
        "zoo-myrtle", f"zoo.py accuracy myrtle --recipe godfrey --seeds 0:8 --out {ZOOS}/myrtle", 4, "zoo.json",
        "accuracy myrtle", ("gpu", "data"),
    ),
    Bench(
        "zoo-myrtle-no-norm",
        f"zoo.py accuracy myrtle --recipe godfrey --option norm=False --seeds 0:4 --out {ZOOS}/myrtle-no-norm", 3,
        "zoo.json", "accuracy myrtle norm=False", ("gpu", "data"),
    ),
    Bench(
        "zoo-resnet20", f"zoo.py accuracy resnet20 --recipe godfrey --seeds 0:4 --out {ZOOS}/resnet20", 5, "zoo.json",
        "accuracy resnet20", ("gpu", "data"),
    ),
    Bench(
        "zoo-resnet18", f"zoo.py accuracy resnet18 --recipe godfrey --seeds 0:3 --out {ZOOS}/resnet18", 10, "zoo.json",
        "accuracy resnet18", ("gpu", "data"),
    ),
    Bench(
        "zoo-vgg16", f"zoo.py accuracy vgg16_bn --recipe chen --seeds 0:2 --out {ZOOS}/vgg16_bn", 5, "zoo.json",
        "accuracy vgg16_bn", ("gpu", "data"),
    ),
    Bench(
        "zoo-tiny10", f"zoo.py accuracy tiny10 --recipe csiszarik --seeds 0:5 --out {ZOOS}/tiny10", 30, "zoo.json",
        "accuracy tiny10", ("gpu", "data"),
    ),
    Bench(
        "stitch-column", f"stitch.py column --zoo {ZOOS}/myrtle --batch 32 --precision bfloat16", 4, "stitch.json",
        "column", ("gpu", "data"),
    ),
    Bench(
        "stitch-relu",
        f"stitch.py relu --zoo {ZOOS}/myrtle --batch 128 --precision bfloat16 --pairs 4 --epochs 10 --rate 0.01", 10,
        "stitch.json", "relu", ("gpu", "data"),
    ),
    Bench(
        "stitch-tiny10", "stitch.py tiny10 --pairs 4 --epochs 30 --train 50000 --test 10000", 30, "stitch.json",
        "tiny10", ("gpu", "data"),
    ),
    Bench(
        "align-myrtle", f"align.py quality myrtle --recipe godfrey --seeds 0:8 --zoo {ZOOS}/myrtle", 15, "align.json",
        "myrtle", ("gpu", "data"),
    ),
    Bench(
        "align-resnet20",
        f"align.py quality resnet20 --recipe godfrey --seeds 0:4 --pairs 2 --seen 5000 --llfc 1000 "
        f"--zoo {ZOOS}/resnet20", 8, "align.json", "resnet20", ("gpu", "data"),
    ),
    Bench(
        "align-resnet20-spawned",
        f"align.py quality resnet20 {SHORT} --spawn 2 --llfc 1000 --zoo {ZOOS}/resnet20-spawned", 4, "align.json",
        "resnet20, spawned after 2", ("gpu", "data"),
    ),
    Bench(
        "align-resnet20-x4", f"align.py quality resnet20 {SHORT} --option width=4 --zoo {ZOOS}/resnet20-x4", 8,
        "align.json", "resnet20 width=4", ("gpu", "data"),
    ),
    Bench(
        "align-resnet20-x8",
        "align.py quality resnet20 --recipe fast --epochs 8 --pairs 1 --seen 5000 --option width=8 "
        f"--zoo {ZOOS}/resnet20-x8", 10, "align.json", "resnet20 width=8", ("gpu", "data"),
    ),
    Bench(
        "align-vgg16",
        f"align.py quality vgg16_bn --recipe chen --epochs 40 --pairs 1 --seen 5000 --zoo {ZOOS}/vgg16_bn-40", 8,
        "align.json", "vgg16_bn", ("gpu", "data"),
    ),
    Bench(
        "align-vit",
        "align_transformers.py --device cuda --task images --data mnist --dim 64 --steps 2500 --batch 256 "
        "--samples 4000", 4, "align_transformers.json", "transformers", ("gpu", "data"),
    ),
    Bench(
        "align-gpt",
        "align_transformers.py --device cuda --task text --dim 128 --steps 3000 --batch 128 --samples 1024", 10,
        "align_transformers.json", "transformers", ("gpu",),
    ),
    Bench("fold-train", f"fold.py train --out {ZOOS}/fold", 33, "fold.json", "train", ("gpu", "data")),
    Bench(
        "fold-vgg16", f"fold.py curves vgg16_bn --zoo {ZOOS}/fold/vgg16_bn-5e-4 {CURVES} --peers PEERS", 15,
        "fold.json", "curves vgg16_bn (chen-one-cycle, weight decay 0.0005), seed 0", ("gpu", "data", "peers"),
    ),
    Bench(
        "fold-vgg16-decay", f"fold.py curves vgg16_bn --zoo {ZOOS}/fold/vgg16_bn-1e-4 {CURVES} --peers PEERS", 15,
        "fold.json", "curves vgg16_bn (chen-one-cycle, weight decay 0.0001), seed 0", ("gpu", "data", "peers"),
    ),
    Bench(
        "fold-resnet18",
        f"fold.py curves resnet18 --zoo {ZOOS}/fold/resnet18-5e-4 --again --seen 2000 --shares 0.6,0.5,0.4,0.3,0.2 "
        "--peers PEERS", 15, "fold.json", "curves resnet18 (chen-one-cycle, weight decay 0.0005), seed 0",
        ("gpu", "data", "peers"),
    ),
)  # fmt: skip

BENCHES = {bench.name: bench for bench in (*ON_A_CPU, *ON_A_GPU)}
