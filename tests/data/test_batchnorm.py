"""Re-estimated BatchNorm statistics against torch's own on one batch, and against all inputs at once."""

import re

import pytest
import torch
from torch import Tensor, nn

import intertwine as it
from intertwine.data.batchnorm import ChannelMoments, reset_statistics
from intertwine.errors import InputError

Batches = list[tuple[Tensor, Tensor]]


def net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout(dropout), nn.Flatten(), nn.Linear(80, 6)]
    return nn.Sequential(*layers, nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 2)).double()


def batches(*sizes: int) -> Batches:
    g = torch.Generator().manual_seed(1)
    return [(3 + torch.randn(n, 3, 6, 6, generator=g, dtype=torch.float64), torch.zeros(n)) for n in sizes]


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def test_004_L02_one_batch_gives_what_torch_keeps_at_full_momentum() -> None:
    model, data = net(), batches(20)
    oracle = net()
    for module in oracle.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.momentum = 1.0
    oracle.train()(data[0][0])
    found, before = reset_statistics(model, data), buffers(net())
    for name, value in buffers(oracle).items():
        torch.testing.assert_close(found.get_buffer(name), value, rtol=1e-12, atol=1e-14)
    assert all(torch.equal(value, before[name]) for name, value in buffers(model).items())


def test_004_L02_many_batches_of_any_size_give_the_moments_of_all_inputs() -> None:
    model, data = net(), batches(20, 3, 8)
    inputs: dict[int, list[Tensor]] = {1: [], 6: []}
    oracle = net().train()
    for index, kept in inputs.items():
        oracle[index].register_forward_pre_hook(lambda _module, args, kept=kept: kept.append(args[0].detach()))
    for x, _ in data:
        oracle(x)
    found = reset_statistics(model, data)
    for index, kept in inputs.items():
        rows = torch.cat(kept).movedim(1, 0).flatten(1)
        torch.testing.assert_close(found.get_buffer(f"{index}.running_mean"), rows.mean(1), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found.get_buffer(f"{index}.running_var"), rows.var(1), rtol=1e-12, atol=1e-14)
    assert found.get_buffer("1.num_batches_tracked").item() == 3


@pytest.mark.parametrize("training", [True, False])
def test_dropout_stays_off_and_the_mode_stays(training: bool) -> None:
    found = reset_statistics(net(dropout=0.5).train(training), batches(8, 8))
    assert all(module.training is training for module in found.modules())
    expected = buffers(reset_statistics(net(), batches(8, 8)))
    assert all(torch.equal(value, expected[name]) for name, value in buffers(found).items())


def test_broken_statistics_are_mended_and_settings_stay() -> None:
    model = net()
    model.get_buffer("1.running_var").fill_(torch.nan)
    found, expected = reset_statistics(model, batches(8)), buffers(reset_statistics(net(), batches(8)))
    assert all(torch.equal(value, expected[name]) for name, value in buffers(found).items())
    assert [m.momentum for m in found.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))] == [0.1, None]


def test_half_precision_is_rounded_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3)).to(torch.bfloat16)
    x = (5 + torch.randn(400, 3)).to(torch.bfloat16)
    found = reset_statistics(model, [(part, 0) for part in x.split(100)])
    assert torch.equal(found.get_buffer("0.running_mean"), x.double().mean(0).to(torch.bfloat16))
    assert torch.equal(found.get_buffer("0.running_var"), x.double().var(0).to(torch.bfloat16))


def test_moments_do_not_cancel() -> None:
    x = 1e8 + torch.randn(1000, 3, dtype=torch.float64)
    moments = ChannelMoments()
    for part in x.split([1, 499, 500]):
        moments.add(part, channels=1)
    torch.testing.assert_close(moments.variance(correction=1), x.var(0), rtol=1e-7, atol=0.0)
    torch.testing.assert_close(moments.mean, x.mean(0), rtol=1e-15, atol=0.0)


def test_004_L02_the_middle_of_two_networks_varies_as_its_layers_say() -> None:
    data = batches(50)
    torch.manual_seed(0)
    a, b = (it.zoo.build("resnet20", width=0.25).double().train() for _ in range(2))
    for model in (a, b):
        for _ in range(30):
            model(data[0][0])
    middle = it.interpolate(a, b, 0.5)
    deviations: list[Tensor] = []
    for model in (middle, reset_statistics(middle, data)):
        normed = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
        normed.register_forward_hook(lambda _m, _args, y: deviations.append(y.detach().movedim(1, 0).flatten(1).std(1)))
        model.eval()(data[0][0])
    assert (deviations[0] < 0.95).any()  # mixed variances are too large for mixed weights
    torch.testing.assert_close(deviations[1], torch.ones_like(deviations[1]), rtol=0.0, atol=1e-2)


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        (nn.Linear(3, 2), [(torch.zeros(4, 3), 0)], "The network has no BatchNorm layer with running statistics"),
        (
            nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False)),
            [(torch.zeros(4, 3), 0)],
            "The network has no BatchNorm layer with running statistics",
        ),
        (net(), [], "The data for the statistics holds no samples"),
        (net(), batches(4, 1), "A batch gives the layer '6' one value per channel, which has no variance"),
    ],
    ids=["no BatchNorm", "no statistics", "no data", "one sample"],
)
def test_bad_input_is_named(model: nn.Module, data: Batches, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        reset_statistics(model, data)
