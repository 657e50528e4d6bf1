"""Speed of stacks and their kernels on one GPU, against its peak compute and memory rates. Part of bench/zoo.py."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from intertwine.errors import InputError
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.datasets.loading import data
from intertwine.lab.zoo.group import initial
from intertwine.lab.zoo.networks.registry import architecture, build
from intertwine.lab.zoo.precision import precision
from intertwine.lab.zoo.recipe import Recipe, recipe
from intertwine.lab.zoo.trainer import StackTrainer

CIFAR10_MEAN, CIFAR10_STD = (125.307, 122.961, 113.8575), (51.5865, 50.847, 51.255)


def measure_speed(name: str, networks: int, batch: int, how: str) -> dict[str, Any]:
    """Seconds per network and epoch of a stack, of the same stack with layers of torch, and of one network alone."""
    images, real = _images()
    recipe_ = recipe(how, batch=batch)
    flops = _flops(name) * len(images.labels)
    row: dict[str, Any] = {
        "architecture": name, "networks": networks, "batch": batch, "recipe": how, "real_data": real,
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "tflop_per_epoch": flops / 1e12,
        "peak_tflops": _peak(), "copy_tb_s": _copy(),
    }  # fmt: skip
    stack = StackTrainer(
        _models(name, networks), range(networks), images, recipe_, precision("bfloat16", torch.device("cuda"))
    )
    _epoch_seconds(stack)  # compiles the kernels and records a step
    row["seconds"] = _epoch_seconds(stack) / networks
    start = time.perf_counter()
    stack.score()
    row["test_s"] = (time.perf_counter() - start) / networks
    row["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    row["tflops"] = flops / row["seconds"] / 1e12
    row["of_peak"] = row["tflops"] / row["peak_tflops"]
    del stack
    row["plain_s"] = _plain_gpu(name, images, recipe_)
    print(json.dumps(row, indent=1), flush=True)
    return row


def _models(name: str, count: int) -> list[nn.Module]:
    return [initial(lambda: build(name), seed) for seed in range(count)]


def _epoch_seconds(trainer: StackTrainer) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    trainer.run_epoch()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _flops(name: str) -> float:
    """Floating-point operations to train on one image: forward, and twice as much backward."""
    model, x = build(name).eval(), architecture(name).example()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return 3.0 * counter.get_total_flops()


def _images() -> tuple[Dataset, bool]:
    try:
        return data("cifar10"), True
    except InputError as error:
        print(f"random images instead of CIFAR-10: {error}")
        generator = torch.Generator().manual_seed(0)
        train, test = (
            (torch.randint(0, 256, (n, 32, 32, 3), generator=generator, dtype=torch.uint8), torch.arange(n) % 10)
            for n in (50_000, 10_000)
        )
        return Dataset.of("random", train, test, CIFAR10_MEAN, CIFAR10_STD, [str(i) for i in range(10)]), False


def _peak() -> float:
    """TFLOP/s of one large matrix product in bfloat16 on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / _gpu_seconds(lambda: a @ b) / 1e12


def _copy() -> float:
    """TB/s of a copy within the GPU's memory, read and written."""
    a = torch.empty(2**32, device="cuda", dtype=torch.uint8)
    b = torch.empty_like(a)
    return 2 * a.numel() / _gpu_seconds(lambda: b.copy_(a)) / 1e12


def _gpu_seconds(call: Callable[[], Any], times: int = 10) -> float:
    """The time of a call with recorded launches, without the CPU overhead."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(times):
        graph.replay()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / times / 1e3


def _plain_gpu(name: str, images: Dataset, how: Recipe, steps: int = 200) -> float:
    """One network in a plain loop (autocast to bfloat16, channels last, data on the GPU), seconds per epoch."""
    model = build(name).cuda()
    model.to(memory_format=torch.channels_last)  # pyrefly: ignore
    inputs, labels = images.inputs(images.images).cuda(), images.labels.cuda()
    optimizer = torch.optim.Adam(model.parameters(), how.rate)
    order = torch.randperm(len(labels), device="cuda")

    def step(i: int) -> None:
        batch = order[i * how.batch : (i + 1) * how.batch]
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(model(inputs[batch].contiguous(memory_format=torch.channels_last)), labels[batch])
        loss.backward()
        optimizer.step()

    for i in range(20):
        step(i)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(steps):
        step(i)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * -(-len(labels) // how.batch)


# -- kernels -----------------------------------------------------------------------------------------------------------

LAYERS = ((32, 16, 64), (32, 64, 128), (16, 128, 256), (8, 256, 512))  # side, channels in, channels out


def measure_kernels(networks: int, batch: int) -> list[dict[str, Any]]:
    """Every kernel on every layer of the Myrtle CNN."""
    return [row for layer in LAYERS for row in _layer(networks, batch, *layer)]


def _layer(networks: int, batch: int, side: int, inside: int, outside: int) -> Iterator[dict[str, Any]]:
    from intertwine.lab.zoo.stacking import conv_kernels as conv
    from intertwine.lab.zoo.stacking import norm_kernels as norm

    x = torch.randn(networks, batch, side, side, inside, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(networks, batch, side, side, outside, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(networks, 3, 3, inside, outside, device="cuda", dtype=torch.bfloat16)
    scale = torch.rand(networks, outside, device="cuda")
    pool = inside > 16
    y = norm.affine_unit(dy, scale, scale, 0.0, None, pool)
    calls: dict[str, tuple[Callable[[], Any], float]] = {
        "convolve": (lambda: conv.convolve(x, w, 1, 1), 0),
        "image gradient": (lambda: conv.image_gradient(dy, w, (side, side), 1, 1), 0),
        "weight gradient": (lambda: conv.weight_gradient(x, dy, (3, 3), 1, 1), 0),
        "moments": (lambda: norm.moments(dy), 1),
        "unit": (lambda: norm.affine_unit(dy, scale, scale, 0.0, None, pool), 1.25 if pool else 2),
        "sums": (
            lambda: norm.unit_sums(dy, y, y, scale, scale, scale, 0.0, False, pool), 1.25 if pool else 2,
        ),
        "unit gradient": (
            lambda: norm.affine_unit_gradient(dy, y, y, scale, scale, 0.0, False, pool, scale, scale, scale),
            2.25 if pool else 3,
        ),
    }  # fmt: skip
    for name, (call, passes) in calls.items():
        seconds = _gpu_seconds(call)
        work = 2 * networks * batch * side * side * 9 * inside * outside / seconds / 1e12
        moved = passes * dy.numel() * 2 / seconds / 1e12
        row = {
            "layer": f"{inside}→{outside} at {side}×{side}", "kernel": name, "ms": seconds * 1e3,
            "tflops": None if passes else work, "tb_s": moved if passes else None,
        }  # fmt: skip
        print(row, flush=True)
        yield row
