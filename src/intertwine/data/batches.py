"""Batches of data: calls of a model on its device and in its precision, and a fingerprint of the samples."""

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

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of one call of a model
DATA_ADVICE = "Pass an iterable of (inputs, targets) batches, such as a DataLoader; one batch is [(inputs, targets)]."
DIGEST_BYTES = 16  # of one sample


def calls(data: Any) -> Iterator[Call]:
    """The arguments of one call of the model per (inputs, targets) batch; targets are left out.

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
    is_dataset = callable(getattr(data, "batches", None))  # a data set of the zoo, with a training and a test part
    advice = 'Pass one part of it: data.batches("test"), or data.batches("train").' if is_dataset else DATA_ADVICE
    raise InputError(f"data must be an iterable of (inputs, targets) batches; found {kind_of(data)}. {advice}")


def check_readable_again(data: Any, reading: str = "The data is read twice") -> None:
    """Refuse data that can be read only once where it is needed again.

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
    """The type of a value, with the shape of a tensor or the length of a tuple or list, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__


def copied_arguments(arguments: Any) -> Any:
    """Arguments with their tensors copied, because a forward that works in place overwrites its inputs.

    >>> import torch
    >>> x = torch.ones(2)
    >>> (y,), _ = copied_arguments(((x,), {}))
    >>> torch.equal(x, y), x is y
    (True, False)
    """
    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, arguments)


def on_device_of(call: Call, model: nn.Module) -> Call:
    """The arguments on the model's device, floats in its precision if all of its weights share one."""
    tensors = [*model.parameters(), *model.buffers()]
    if not tensors:
        return call
    if any(tensor.is_meta for tensor in tensors):
        raise InputError(
            f"{type(model).__name__} cannot run on data: some of its weights are on the meta device and hold no "
            "numbers. Load them first: model.load_state_dict(state, assign=True)."
        )
    dtypes = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else None

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(tensors[0].device, dtype if value.is_floating_point() else None)

    return tree_map(moved, call)


# -- Fingerprints of data ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fingerprint:
    """Which samples were read: how many, a digest of them in their order, and one that ignores the order."""

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
            problem = f"{first} has {self.samples} samples and {second} {other.samples}. Give both the same inputs."
        elif self.unordered == other.unordered:
            problem = (
                f"{first} and {second} have the same {self.samples} samples in another order. Turn shuffling off, or "
                "collect both from one list of batches."
            )
        else:
            problem = (
                f"the {self.samples} samples of {first} are not those of {second}: their inputs differ. Random "
                "augmentation, another normalisation or another dtype is enough; give both the same inputs."
            )
        raise MismatchError(f"Features are compared sample by sample, but {problem}")

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"samples": self.samples, "digest": self.digest, "unordered": self.unordered}

    def __repr__(self) -> str:
        return f"Fingerprint({self.samples} samples, {self.digest[:8]})"


@dataclass
class Hasher:
    """A running fingerprint, updated with the arguments of each call of the model."""

    axis: int = 0  # of the inputs, along which the samples lie
    samples: int = 0
    _ordered: Any = field(default_factory=hashlib.sha256)
    _total: int = 0

    @property
    def fingerprint(self) -> Fingerprint:
        """Of all samples so far."""
        total = self._total.to_bytes(DIGEST_BYTES, "big").hex()
        return Fingerprint(self.samples, self._ordered.hexdigest()[: 2 * DIGEST_BYTES], total)

    def add(self, call: Call) -> Hasher:
        """Add one batch, sample by sample, so that the batch size does not matter."""
        count = samples_of(call, self.axis)
        shared = hashlib.blake2b(digest_size=DIGEST_BYTES)
        rows: list[Any] = []
        for path, value in sorted(_values(call), key=itemgetter(0)):  # keywords have no order
            if isinstance(value, Tensor) and value.dim() > self.axis and value.shape[self.axis] == count:
                by_sample = value.movedim(self.axis, 0)
                shared.update(f"{path}:{value.dtype}{tuple(by_sample.shape[1:])};".encode())
                rows.append(_bytes(by_sample, count))
            elif isinstance(value, Tensor):  # not one entry per sample: part of every sample
                shared.update(f"{path}:{value.dtype}{tuple(value.shape)};".encode() + _bytes(value, 1).tobytes())
            else:
                plain = value if isinstance(value, (str, int, float, type(None))) else type(value).__name__
                shared.update(f"{path}={plain!r};".encode())
        for i in range(count):
            sample = shared.copy()
            for row in rows:
                sample.update(row[i])
            digest = sample.digest()
            self._ordered.update(digest)
            self._total = (self._total + int.from_bytes(digest, "big")) % (1 << 8 * DIGEST_BYTES)
        self.samples += count
        return self


def samples_of(call: Call, axis: int = 0) -> int:
    """The number of samples of a batch: the size of the first input tensor along the sample axis.

    >>> samples_of(((torch.zeros(5, 2),), {}))
    5
    """
    for _, value in _values(call):
        if isinstance(value, Tensor) and value.dim() > axis:
            return value.shape[axis]
    raise InputError(
        "The inputs of a batch hold no tensor with a sample axis. Inputs are a tensor, a tuple of tensors or a mapping "
        "of keyword arguments; turn arrays into tensors first."
    )


def _values(call: Call) -> list[tuple[str, Any]]:
    return [(keystr(path), value) for path, value in tree_flatten_with_path(call)[0]]


def _bytes(tensor: Tensor, rows: int) -> Any:
    """The raw bytes of a tensor, split into rows."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(rows, -1 if plain.numel() else 0).view(torch.uint8).numpy()


# -- Batches with targets ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LabelledBatch:
    """One batch on the device of a model: the arguments of the call, the targets, and the number of samples."""

    given: Call
    targets: Any
    samples: int

    @property
    def call(self) -> Call:
        """A copy of the arguments: a forward may overwrite them, and the next network needs the same ones."""
        return copied_arguments(self.given)


def labelled_batches(
    data: Any, model: nn.Module, hasher: Hasher | None = None, purpose: str = "data"
) -> Iterator[LabelledBatch]:
    """The batches of some data, moved to the device of a model; batches without samples are left out.

    >>> import torch
    >>> batches = labelled_batches([(torch.zeros(4, 3), torch.zeros(4).long())], nn.Linear(3, 2))
    >>> [batch.samples for batch in batches]
    [4]
    """
    check_batches(data)
    empty = True
    for batch in data:
        call = _call(batch)
        if not (samples := samples_of(call)):
            continue
        empty = False
        if hasher is not None:
            hasher.add(call)
        ((targets,), _) = on_device_of(((batch[1],), {}), model)
        yield LabelledBatch(on_device_of(call, model), targets, samples)
    if empty:
        raise InputError(
            f"The {purpose} holds no samples. Pass at least one batch (inputs, targets); a generator can be read only "
            "once, so pass a list or a DataLoader where data is needed twice."
        )
