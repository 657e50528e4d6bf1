"""Dissection: interpretable units in rotated bases Q^α, with and without the ReLU behind each residual sum.

Godfrey et al. 2022, figures 3, 18 and 19, have ResNet-50 and ConvNeXt on Broden; here small networks learn pictures of
colours, textures, shapes and parts, which are drawn as they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from intertwine.inspect.rotation_scan import rotation_scan
from intertwine.reproduce.kinds.dissection.drawing import draw
from intertwine.reproduce.kinds.dissection.fractions import WITH, WITHOUT, numbers
from intertwine.reproduce.kinds.dissection.settings import Dissection
from intertwine.reproduce.kinds.registry import Kind, Row
from intertwine.reproduce.networks import Pair, groups
from intertwine.reproduce.work import Work
from intertwine.zoo.concepts import ConceptImages, concept_images
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.folder import Zoo


class DrawnWork(Work):
    """Work whose data is drawn instead of read."""

    @cached_property
    def data(self) -> Dataset:
        """The pictures that networks learn from, and those that test them."""
        wanted: Dissection = self.plan.settings
        return concept_images(wanted.pictures, wanted.seed, wanted.size, wanted.task).dataset(wanted.test)

    @cached_property
    def seen(self) -> ConceptImages:
        """Other pictures, with their labels: what networks are dissected on."""
        wanted: Dissection = self.plan.settings
        return concept_images(wanted.seen, wanted.seen_seed, wanted.size, wanted.task)


def run(work: Work) -> list[Row]:
    """One row per network, place and rotation."""
    drawn = DrawnWork(work.plan, work.folder, work.device, work.tell, work.data_folder)
    return drawn.per_pair(lambda pair, folder: _dissected(drawn, pair))


def _dissected(work: DrawnWork, pair: Pair) -> Iterator[Row]:
    """The rows of one network (both ends of its pair are the same)."""
    wanted: Dissection = work.plan.settings
    place, seed = pair.front
    zoo = work.sources[place]
    assert isinstance(zoo, Zoo)
    accuracy = zoo.records[zoo.seeds.index(seed)].accuracy
    about = {"kind": WITH if groups(work.plan)[place].value else WITHOUT, "network": seed, "accuracy": accuracy}
    seeds = range(wanted.rotations)
    for at in wanted.at:
        scan = rotation_scan(
            work.network(pair.front), at, work.seen.inputs(), work.seen.concepts, wanted.alphas, seeds=seeds
        )
        yield from (about | {"chance": scan.chance} | row for row in scan.to_rows())


KIND = Kind(Dissection, run, numbers, draw)
