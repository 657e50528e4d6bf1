"""A benchmark of similarity measures on networks for which the right answer is known."""

from intertwine.lab.measure_benchmark.benchmark import MeasureBenchmark as MeasureBenchmark
from intertwine.lab.measure_benchmark.benchmark import benchmark_measure as benchmark_measure
