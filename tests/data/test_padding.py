"""Padding of text enters no rows and no means."""

import re

import pytest
import torch
from torch import Tensor, nn

import intertwine as it
from intertwine.data.layouts import arrange, arrange_pair, mask_of
from intertwine.errors import InputError, MismatchError

LENGTHS = (7, 4, 5, 2, 6, 7)
Batch = tuple[dict[str, Tensor], None]


def sentences(padding: int = 0) -> list[Batch]:
    """Two batches of three sentences, padded on the right with `padding` as the token that stands there."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (6, 7), generator=g)
    mask = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    ids = torch.where(mask, ids, padding)
    return [
        ({"input_ids": i, "attention_mask": m.long()}, None) for i, m in zip(ids.split(3), mask.split(3), strict=True)
    ]


class Reader(nn.Module):
    """Each token by itself, so that what stands in padding changes nothing elsewhere."""

    def __init__(self, seed: int, steps: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.mix, self.steps = nn.Embedding(50, 8), nn.Linear(8, 6), steps
        self.short = nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.short(self.mix(self.embed(input_ids))[:, :: self.steps])


def by_hand(model: Reader) -> list[Tensor]:
    """The tokens of every sentence, without padding."""
    with torch.no_grad():
        return [
            model.mix(model.embed(ids[:length]))
            for (inputs, _), k in zip(sentences(), (0, 3), strict=True)
            for ids, length in zip(inputs["input_ids"], LENGTHS[k : k + 3], strict=True)
        ]


@pytest.mark.parametrize("policy", ["tokens", "channels"])
def test_rows_are_tokens_and_nothing_else(policy: str) -> None:
    model = Reader(0)
    expected = torch.cat(by_hand(model))
    found = it.features(model, sentences(), "mix")
    assert torch.allclose(found.collect(policy)["mix"], expected, atol=1e-6)
    kept = found.collect()
    assert kept.mask is not None
    assert kept.mask.sum(1).tolist() == list(LENGTHS)
    assert torch.allclose(kept.view("mix", policy), expected, atol=1e-6)
    assert torch.allclose(kept.collect(policy)["mix"], expected, atol=1e-6)


def test_means_are_over_tokens_and_nothing_else() -> None:
    model = Reader(0)
    expected = torch.stack([tokens.mean(0) for tokens in by_hand(model)])
    found = it.features(model, sentences(), "mix").collect("pool")
    assert torch.allclose(found["mix"], expected, atol=1e-6)
    assert found.mask is None


@pytest.mark.parametrize("policy", ["tokens", "channels", "pool"])
@pytest.mark.parametrize("name", ["linear_cka", "kernel_alignment", "relu_procrustes", "soft_matching"])
def test_a_comparison_does_not_see_what_stands_in_padding(name: str, policy: str) -> None:
    """Streamed or collected: other padding, the same value, which is that of the tokens alone."""
    a, b = Reader(0), Reader(1)
    values = [it.compare(a, b, sentences(fill), "mix", [name], policy).result("mix", "mix").value for fill in (0, 49)]
    assert values[0] == pytest.approx(values[1], abs=1e-9)
    x, y = (by_hand(model) for model in (a, b))
    join = (lambda parts: torch.stack([p.mean(0) for p in parts])) if policy == "pool" else torch.cat
    assert values[0] == pytest.approx(it.measure(join(x), join(y), name).value, abs=1e-5)


def test_batches_padded_to_their_own_length() -> None:
    """As tokenizers do: the longest sentence of each batch decides."""
    cut = [({k: v[:, : int(x["attention_mask"].sum(1).max())] for k, v in x.items()}, None) for x, _ in sentences()]
    cut[0] = ({k: torch.cat([v, 0 * v[:, :2]], 1) for k, v in cut[0][0].items()}, None)
    for name, policy in (("linear_cka", "tokens"), ("r2", "tokens"), ("linear_cka", "pool"), ("rsa", "pool")):
        plain, other = (it.compare(Reader(0), Reader(1), d, "mix", [name], policy) for d in (sentences(), cut))
        assert torch.allclose(other.matrix(), plain.matrix(), atol=1e-6), (name, policy)
    with pytest.raises(MismatchError, match='such as "pool", or "tokens" for padded text'):
        it.features(Reader(0), cut, "mix").collect()


def test_masks_are_read_where_they_say_what_is_padding() -> None:
    true = torch.tensor([[True, False]])
    assert mask_of(((), {})) is None
    assert mask_of(((), {"attention_mask": true[:, None, None]})) is None
    assert mask_of(((), {"attention_mask": torch.tensor([[0.0, -1e9]])})) is None
    assert mask_of(((), {"attention_mask": torch.tensor([[1, 0]])})).tolist() == [[True, False]]  # pyrefly: ignore
    assert mask_of(((), {"src_key_padding_mask": true})).tolist() == [[False, True]]  # pyrefly: ignore


def test_numbers_that_are_not_finite_in_padding_do_not_matter() -> None:
    x, mask = torch.ones(2, 3, 4), torch.tensor([[True, True, False], [True, True, True]])
    x[0, 2] = torch.nan
    assert arrange(x, "pool", "ntc", mask).tolist() == [[1.0] * 4] * 2
    assert arrange(x.half(), "pool", "ntc", mask).dtype == torch.float32
    assert arrange(x.transpose(0, 1), "tokens", "tnc", mask).shape == (5, 4)
    a, b = arrange_pair(x, x.transpose(1, 2), "channels", ("ntc", "ncp"), mask)
    assert torch.equal(a, b)


def test_full_masks_change_nothing() -> None:
    x, mask = torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    for policy in ("flatten", "tokens", "pool", "structured", "channels"):
        assert torch.equal(arrange(x, policy, "ntc", mask), arrange(x, policy, "ntc"))
    assert torch.equal(arrange(x, "channels", "ntc", torch.ones(2, 9, dtype=torch.bool)), arrange(x, "channels", "ntc"))


def test_what_cannot_be_masked_is_refused() -> None:
    model, data = Reader(0, steps=2), sentences()
    with pytest.raises(MismatchError, match=re.escape("3 samples × 7 tokens, but a layer has 3 × 4: which of its tok")):
        it.features(model, data, ["short"]).collect("tokens")
    for policy in ("flatten", "structured"):
        with pytest.raises(InputError, match=f"policy '{policy}' would compare it: it has an entry for every token"):
            it.features(model, data, ["mix"]).collect(policy)
    with pytest.raises(InputError, match='such as relu_cka, need "pool" here'):
        it.compare(model, model, data, ["mix"], ["relu_cka"], "tokens")
    empty = [({"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, None)]
    with pytest.raises(InputError, match="Sample 1 of a batch has padding only"):
        it.features(model, empty, ["mix"]).collect("pool")


@pytest.mark.models
def test_a_transformer() -> None:
    """BERT attends to no padding: with more of it, its tokens and all values stay as they were."""
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=32, **size)
    torch.manual_seed(0)
    a, b = (transformers.BertModel(config).eval() for _ in range(2))
    more = [({k: torch.cat([v, 0 * v], 1) for k, v in x.items()}, None) for x, _ in sentences()]
    layers = ["encoder.layer.0", "encoder.layer.1.output"]
    assert it.features(a, more, layers).collect("tokens")[layers[1]].shape == (sum(LENGTHS), 16)
    for name, policy in (("linear_cka", "tokens"), ("relu_procrustes", "tokens"), ("linear_cka", "pool")):
        plain, padded = (it.compare(a, b, data, layers, [name], policy).matrix() for data in (sentences(), more))
        assert torch.allclose(plain, padded, atol=1e-5), name
