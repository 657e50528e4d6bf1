"""Reading data: any iterable of (inputs, targets) as calls of a model on its device and in its precision, and a
fingerprint of the samples that were read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from intertwine.errors import InputError, MismatchError

# ----------------------------------------------------------------------------------------------------
# Batches: any iterable of (inputs, targets) as calls of a model, on its device and in its precision.


Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of one call of a model
DATA_ADVICE = "Pass an iterable of (inputs, targets) batches, such as a DataLoader; one batch is [(inputs, targets)]."


def calls(data: Any) -> Iterator[Call]:
    """The arguments of the call that each (inputs, targets) batch stands for; targets are left out.

    >>> import torch
    >>> x, y = torch.zeros(4, 3), torch.zeros(4)
    >>> [len(args[0]) for args, _ in calls([(x, y), (x[:2], y[:2])])]
    [4, 2]
    """
    check_batches(data)
    return (_call(batch) for batch in data)


def check_batches(data: Any) -> None:
    """Refuse what no batches can be read from.

    >>> check_batches([])
    >>> check_batches("digits")
    Traceback (most recent call last):
    intertwine.errors.InputError: data must be an iterable of (inputs, targets) batches; found str. Pass an iterable ...
    """
    if not isinstance(data, (str, bytes, Tensor, Mapping)) and isinstance(data, Iterable):
        return
    whole = callable(getattr(data, "batches", None))  # a data set of the zoo, with a training and a test part
    advice = 'Pass one part of it: data.batches("test"), or data.batches("train").' if whole else DATA_ADVICE
    raise InputError(f"data must be an iterable of (inputs, targets) batches; found {kind_of(data)}. {advice}")


def check_readable_again(data: Any, reading: str = "The data is read twice") -> None:
    """Refuse data that is gone after one pass, where it is needed again.

    >>> check_readable_again(batch for batch in [])
    Traceback (most recent call last):
    intertwine.errors.InputError: The data is read twice, but a generator can be read only once. Pass a list or a ...
    """
    if isinstance(data, Iterator):
        raise InputError(f"{reading}, but a generator can be read only once. Pass a list or a DataLoader.")


def _call(batch: Any) -> Call:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise InputError(f"A batch of the data must be a pair (inputs, targets); found {kind_of(batch)}. {DATA_ADVICE}")
    inputs = batch[0]
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Tensor) or (isinstance(inputs, (tuple, list)) and inputs):
        return ((inputs,) if isinstance(inputs, Tensor) else tuple(inputs)), {}
    raise InputError(
        f"The inputs of a batch must be a tensor, a tuple of tensors or a mapping of keyword arguments; found "
        f"{kind_of(inputs)}. {DATA_ADVICE}"
    )


def kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__


def copied_arguments(given: Any) -> Any:
    """Arguments or other values with their tensors copied: a forward that works in place writes over what it is given.

    >>> import torch
    >>> x = torch.ones(2)
    >>> (y,), _ = copied_arguments(((x,), {}))
    >>> torch.equal(x, y), x is y
    (True, False)
    """
    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, given)


def on_device_of(call: Call, model: nn.Module) -> Call:
    """The arguments on the model's device; numbers in its precision, where all of its weights share one."""
    tensors = [*model.parameters(), *model.buffers()]
    if not tensors:
        return call
    if any(tensor.is_meta for tensor in tensors):
        raise InputError(
            f"{type(model).__name__} was to be run on data, but weights of it are on the meta device and hold no "
            "numbers. Load them first: model.load_state_dict(state, assign=True)."
        )
    kinds = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
    dtype = next(iter(kinds)) if len(kinds) == 1 else None

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(tensors[0].device, dtype if value.is_floating_point() else None)

    return tree_map(place, call)


# ----------------------------------------------------------------------------------------------------
# A fingerprint of the data behind some features: which samples, in which order, however they were cut into batches.


WIDTH = 16  # bytes of the digest of one sample


@dataclass(frozen=True)
class Fingerprint:
    """How many samples, a digest of them in their order, and one of the same samples in any order."""

    samples: int
    digest: str
    unordered: str

    def check(self, other: Fingerprint, first: str = "the first", second: str = "the second") -> None:
        """Refuse two sets of features that do not belong together sample by sample.

        >>> a, b = (Hasher().add(((torch.arange(n),), {})).fingerprint for n in (3, 4))
        >>> a.check(a)
        >>> a.check(b)
        Traceback (most recent call last):
        intertwine.errors.MismatchError: Features are compared sample by sample, but the first has 3 samples and ...
        """
        if self == other:
            return
        if self.samples != other.samples:
            raise MismatchError(
                f"Features are compared sample by sample, but {first} has {self.samples} samples and {second} "
                f"{other.samples}. Give both the same inputs."
            )
        if self.unordered == other.unordered:
            raise MismatchError(
                f"Features are compared sample by sample, but {first} and {second} have the same {self.samples} "
                "samples in another order. Turn shuffling off, or collect both from one list of batches."
            )
        raise MismatchError(
            f"Features are compared sample by sample, but the {self.samples} samples of {first} are not those of "
            f"{second}: their inputs differ. Random augmentation, another normalisation or another type of numbers is "
            "enough; give both the same inputs."
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"samples": self.samples, "digest": self.digest, "unordered": self.unordered}

    def __repr__(self) -> str:
        return f"Fingerprint({self.samples} samples, {self.digest[:8]})"


@dataclass
class Hasher:
    """A running fingerprint: give it the arguments of each call of the model."""

    axis: int = 0  # of the inputs, along which the samples lie
    samples: int = 0
    _ordered: Any = field(default_factory=hashlib.sha256)
    _total: int = 0

    @property
    def fingerprint(self) -> Fingerprint:
        """Of all samples until now."""
        total = self._total.to_bytes(WIDTH, "big").hex()
        return Fingerprint(self.samples, self._ordered.hexdigest()[: 2 * WIDTH], total)

    def add(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Hasher:
        """Take in one batch, sample by sample, so that the size of batches does not matter."""
        count = samples_of(call, self.axis)
        head = hashlib.blake2b(digest_size=WIDTH)
        rows: list[Any] = []
        for path, leaf in sorted(_leaves(call), key=itemgetter(0)):  # keywords have no order
            if isinstance(leaf, Tensor) and leaf.dim() > self.axis and leaf.shape[self.axis] == count:
                by_sample = leaf.movedim(self.axis, 0)
                head.update(f"{path}:{leaf.dtype}{tuple(by_sample.shape[1:])};".encode())
                rows.append(_bytes(by_sample, count))
            elif isinstance(leaf, Tensor):  # not one entry per sample: part of every sample
                head.update(f"{path}:{leaf.dtype}{tuple(leaf.shape)};".encode() + _bytes(leaf, 1).tobytes())
            else:
                plain = leaf if isinstance(leaf, (str, int, float, type(None))) else type(leaf).__name__
                head.update(f"{path}={plain!r};".encode())
        for i in range(count):
            one = head.copy()
            for row in rows:
                one.update(row[i])
            digest = one.digest()
            self._ordered.update(digest)
            self._total = (self._total + int.from_bytes(digest, "big")) % (1 << 8 * WIDTH)
        self.samples += count
        return self

    def watch(self, batches: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> Iterator[Any]:
        """The same calls, each taken in as it passes."""
        for call in batches:
            self.add(call)
            yield call


def samples_of(call: tuple[tuple[Any, ...], dict[str, Any]], axis: int = 0) -> int:
    """The number of samples of a batch: the size of the first tensor among the inputs along the axis of samples.

    >>> samples_of(((torch.zeros(5, 2),), {}))
    5
    """
    leaves = [leaf for _, leaf in _leaves(call) if isinstance(leaf, Tensor) and leaf.dim() > axis]
    if not leaves:
        raise InputError(
            "The inputs of a batch hold no tensor with an axis of samples. Inputs are a tensor, a tuple of tensors or "
            "a mapping of keyword arguments; turn arrays into tensors first."
        )
    return leaves[0].shape[axis]


def _leaves(call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(call)[0]]


def _bytes(tensor: Tensor, rows: int) -> Any:
    """The raw bytes of a tensor, cut into rows."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(rows, -1 if plain.numel() else 0).view(torch.uint8).numpy()


# ----------------------------------------------------------------------------------------------------
# Labelled batches: what a pass over (inputs, targets) needs, on the device and in the precision of a network.


@dataclass(frozen=True, eq=False)
class LabelledBatch:
    """One batch: the arguments of the call, the targets, and the number of samples."""

    given: Call
    targets: Any
    samples: int

    @property
    def call(self) -> Call:
        """The arguments for one call: a forward may write over them, and other networks are to see the same ones."""
        return copied_arguments(self.given)


def labelled_batches(
    data: Any, model: nn.Module, hasher: Hasher | None = None, purpose: str = "data"
) -> Iterator[LabelledBatch]:
    """The batches of some data, placed for a model; batches without samples are left out.

    >>> import torch
    >>> batches = labelled_batches([(torch.zeros(4, 3), torch.zeros(4).long())], nn.Linear(3, 2))
    >>> [batch.samples for batch in batches]
    [4]
    """
    check_batches(data)
    found = False
    for batch in data:
        (call,) = calls([batch])
        if not (samples := samples_of(call)):
            continue
        found = True
        if hasher is not None:
            hasher.add(call)
        ((targets,), _) = on_device_of(((batch[1],), {}), model)
        yield LabelledBatch(on_device_of(call, model), targets, samples)
    if not found:
        raise InputError(
            f"The {purpose} holds no samples. Pass at least one batch (inputs, targets); a generator can be read only "
            "once, so pass a list or a DataLoader where data is needed twice."
        )
