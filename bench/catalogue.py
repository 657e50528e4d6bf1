"""The models of the coverage benchmark.

One model of every timm family, every torchvision classification model, and a small model of many transformers
architectures. Nothing is downloaded: every model has the same random weights each time. An entry imports its package
only when it is built, so importing this file is cheap.

    for entry in entries("timm"):
        model, args, kwargs = entry.build()
        model(*args, **kwargs)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Entry:
    """One model; `build` returns it in eval mode, with positional and keyword arguments of an example call."""

    name: str
    source: str
    build: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


def entries(source: str | None = None) -> list[Entry]:
    """All entries, or those of one source: "timm", "torchvision" or "transformers"."""
    makers = {
        "timm": (TIMM.values(), _timm),
        "torchvision": (TORCHVISION, _torchvision),
        "transformers": (TRANSFORMERS, _transformers),
    }
    if source is not None and source not in makers:
        raise ValueError(f"unknown source {source!r}: the sources are {', '.join(makers)}")
    return [
        Entry(name, origin, partial(_build, make, name))
        for origin, (names, make) in makers.items()
        if source in (None, origin)
        for name in names
    ]


def _build(
    make: Callable[[str], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]], name: str
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Build one model with fixed random numbers; the global generator is restored."""
    import torch

    from intertwine.checkpoints.libraries import declare_missing_ops

    declare_missing_ops()  # timm and some of transformers import torchvision, so this comes before all three
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, args, kwargs = make(name)
    return model.eval(), args, kwargs


def _image(batch: int, side: int) -> torch.Tensor:
    """An example batch of square colour images."""
    import torch

    return torch.randn(batch, 3, side, side)


# -- timm: the smallest model of every family --------------------------------------------------------------------------

# Family → its model with the fewest parameters, by `smallest_of_each_timm_family` with timm 1.0.30.
TIMM: dict[str, str] = {
    "beit": "beit_base_patch16_224",
    "byoanet": "halonet_h1",
    "byobnet": "test_byobnet",
    "cait": "cait_xxs24_224",
    "coat": "coat_tiny",
    "convit": "convit_tiny",
    "convmixer": "convmixer_768_32",
    "convnext": "test_convnext",
    "cpubone": "cpubone_nano",
    "crossvit": "crossvit_tiny_240",
    "csatv2": "csatv2",
    "cspnet": "cs3darknet_focus_s",
    "davit": "davit_tiny",
    "deepseek_vit": "deepseek_vit_412m",
    "deit": "deit_tiny_patch16_224",
    "densenet": "densenet121",
    "dla": "dla46x_c",
    "dpn": "dpn48b",
    "edgenext": "edgenext_xx_small",
    "efficientformer": "efficientformer_l1",
    "efficientformer_v2": "efficientformerv2_s0",
    "efficientnet": "test_efficientnet",
    "efficientvim": "efficientvim_m1",
    "efficientvit_mit": "efficientvit_b0",
    "efficientvit_msra": "efficientvit_m0",
    "eva": "vit_tiny_patch16_dinov3_qkvb",
    "fasternet": "fasternet_t0",
    "fastvit": "fastvit_t8",
    "focalnet": "focalnet_tiny_srf",
    "gcvit": "gcvit_xxtiny",
    "gemma4_vit": "gemma4_vit_167m",
    "ghostnet": "ghostnet_050",
    "hardcorenas": "hardcorenas_b",
    "hgnet": "hgnetv2_b0",
    "hiera": "hiera_tiny_224",
    "hieradet_sam2": "sam2_hiera_tiny",
    "hrnet": "hrnet_w18_small",
    "iformer": "iformer_t",
    "inception_next": "inception_next_atto",
    "inception_resnet_v2": "inception_resnet_v2",
    "inception_v3": "inception_v3",
    "inception_v4": "inception_v4",
    "lcnetv2": "lcnetv2_small",
    "levit": "levit_128s",
    "lowformer": "lowformer_b0",
    "mambaout": "test_mambaout",
    "maxxvit": "maxvit_pico_rw_256",
    "metaformer": "poolformerv2_s12",
    "mlp_mixer": "gmlp_ti16_224",
    "mobilenetv3": "mobilenetv3_small_050",
    "mobilenetv5": "mobilenetv5_base",
    "mobilevit": "mobilevit_xxs",
    "mvitv2": "mvitv2_tiny",
    "naflexvit": "naflexvit_base_patch16_parfac_gap",
    "nasnet": "nasnetalarge",
    "nest": "nest_tiny",
    "nextvit": "nextvit_small",
    "nfnet": "test_nfnet",
    "pit": "pit_ti_224",
    "pnasnet": "pnasnet5large",
    "pvt_v2": "pvt_v2_b0",
    "qwen3_vit": "qwen3_vit_88m",
    "rdnet": "rdnet_tiny",
    "regnet": "regnetx_002",
    "repghost": "repghostnet_050",
    "repvit": "repvit_m1",
    "res2net": "res2next50",
    "resnest": "resnest14d",
    "resnet": "test_resnet",
    "resnetv2": "resnetv2_18",
    "rexnet": "rexnet_100",
    "selecsls": "selecsls42",
    "senet": "legacy_seresnet18",
    "sequencer": "sequencer2d_s",
    "shvit": "shvit_s1",
    "sknet": "skresnet18",
    "starnet": "starnet_s050",
    "swiftformer": "swiftformer_xs",
    "swin_transformer": "swin_tiny_patch4_window7_224",
    "swin_transformer_v2": "swinv2_tiny_window16_256",
    "swin_transformer_v2_cr": "swinv2_cr_tiny_224",
    "tiny_vit": "tiny_vit_5m_224",
    "tnt": "tnt_s_legacy_patch16_224",
    "tresnet": "tresnet_m",
    "twins": "twins_svt_small",
    "vgg": "vgg11",
    "visformer": "visformer_tiny",
    "vision_transformer": "test_vit",
    "vision_transformer_hybrid": "vit_tiny_r_s16_p8_224",
    "vision_transformer_relpos": "vit_srelpos_small_patch16_224",
    "vision_transformer_sam": "samvit_base_patch16_224",
    "vitamin": "vitamin_small_224",
    "volo": "volo_d1_224",
    "vovnet": "ese_vovnet19b_slim_dw",
    "xception": "legacy_xception",
    "xception_aligned": "xception41p",
    "xcit": "xcit_nano_12_p8_224",
}

# Image sides other than 64: 64 is too small, the side is part of the model (position tables, windows), or the model
# would resize its input or its position table, which it does not do in normal use.
TIMM_SIDES: dict[str, int] = {
    "beit_base_patch16_224": 224,
    "halonet_h1": 256,
    "cait_xxs24_224": 224,
    "coat_tiny": 224,
    "convit_tiny": 224,
    "crossvit_tiny_240": 240,
    "deepseek_vit_412m": 84,
    "deit_tiny_patch16_224": 224,
    "efficientformer_l1": 224,
    "efficientformerv2_s0": 224,
    "efficientvit_m0": 224,
    "gcvit_xxtiny": 224,
    "hiera_tiny_224": 224,
    "inception_resnet_v2": 96,
    "inception_v3": 96,
    "inception_v4": 96,
    "levit_128s": 224,
    "maxvit_pico_rw_256": 256,
    "gmlp_ti16_224": 224,
    "mvitv2_tiny": 224,
    "nest_tiny": 224,
    "pit_ti_224": 224,
    "swin_tiny_patch4_window7_224": 224,
    "swinv2_tiny_window16_256": 256,
    "swinv2_cr_tiny_224": 224,
    "tnt_s_legacy_patch16_224": 224,
    "visformer_tiny": 224,
    "test_vit": 160,
    "vit_tiny_r_s16_p8_224": 224,
    "vit_srelpos_small_patch16_224": 224,
    "samvit_base_patch16_224": 224,
    "vitamin_small_224": 224,
    "volo_d1_224": 224,
}

# Families with no model below 150 million parameters: fewer of their equal blocks.
TIMM_OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek_vit_412m": {"depth": 3},
    "gemma4_vit_167m": {"depth": 3},
}


def smallest_of_each_timm_family() -> dict[str, str]:
    """Compute the table `TIMM`, for a new version of timm; takes a few minutes."""
    from intertwine.checkpoints.libraries import declare_missing_ops

    declare_missing_ops()
    import timm
    import torch

    def parameters(name: str) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in timm.create_model(name, pretrained=False).parameters())

    families = {family: timm.list_models(module=family) for family in timm.list_modules()}
    return {family: min(sorted(names), key=parameters) for family, names in families.items() if names}


def _timm(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Build a timm model and a batch of images for it."""
    import timm

    model = timm.create_model(name, pretrained=False, **TIMM_OPTIONS.get(name, {}))
    return model, (_image(2, TIMM_SIDES.get(name, 64)),), {}


# -- torchvision: every classification model ---------------------------------------------------------------------------

TORCHVISION: tuple[str, ...] = (
    "alexnet",
    "convnext_base",
    "convnext_large",
    "convnext_small",
    "convnext_tiny",
    "densenet121",
    "densenet161",
    "densenet169",
    "densenet201",
    "efficientnet_b0",
    "efficientnet_b1",
    "efficientnet_b2",
    "efficientnet_b3",
    "efficientnet_b4",
    "efficientnet_b5",
    "efficientnet_b6",
    "efficientnet_b7",
    "efficientnet_v2_l",
    "efficientnet_v2_m",
    "efficientnet_v2_s",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mnasnet0_75",
    "mnasnet1_0",
    "mnasnet1_3",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "mobilenet_v3_small",
    "regnet_x_16gf",
    "regnet_x_1_6gf",
    "regnet_x_32gf",
    "regnet_x_3_2gf",
    "regnet_x_400mf",
    "regnet_x_800mf",
    "regnet_x_8gf",
    "regnet_y_128gf",
    "regnet_y_16gf",
    "regnet_y_1_6gf",
    "regnet_y_32gf",
    "regnet_y_3_2gf",
    "regnet_y_400mf",
    "regnet_y_800mf",
    "regnet_y_8gf",
    "resnet101",
    "resnet152",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "resnext50_32x4d",
    "shufflenet_v2_x0_5",
    "shufflenet_v2_x1_0",
    "shufflenet_v2_x1_5",
    "shufflenet_v2_x2_0",
    "squeezenet1_0",
    "squeezenet1_1",
    "swin_b",
    "swin_s",
    "swin_t",
    "swin_v2_b",
    "swin_v2_s",
    "swin_v2_t",
    "vgg11",
    "vgg11_bn",
    "vgg13",
    "vgg13_bn",
    "vgg16",
    "vgg16_bn",
    "vgg19",
    "vgg19_bn",
    "vit_b_16",
    "vit_b_32",
    "vit_h_14",
    "vit_l_16",
    "vit_l_32",
    "wide_resnet101_2",
    "wide_resnet50_2",
)

# Image sides other than 64; here too the side is part of the model, or 64 is too small.
TORCHVISION_SIDES: dict[str, int] = {"inception_v3": 96, "maxvit_t": 224, "vit_h_14": 56}


def _torchvision(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Build a torchvision model and a batch of images for it."""
    from torchvision.models import get_model

    side = TORCHVISION_SIDES.get(name, 64)
    options: dict[str, Any] = {}
    if name.startswith("vit_"):
        options["image_size"] = side
    elif name.startswith(("vgg", "googlenet", "inception")):
        options["init_weights"] = False  # their own way to draw weights is slow; the layers' default is as good here
    return get_model(name, weights=None, **options), (_image(2, side),), {}


# -- transformers: small models ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A config class with its options, the model class that takes it, and the kinds of input it reads."""

    config: str
    model: str
    inputs: str
    options: dict[str, Any]


# The sizes are chosen so that no two dimensions of a model agree by accident: batch 5, texts of 7 tokens (9 for a
# decoder's text), 101 words, 37 positions, width 48, 4 heads of 12, inner width 80, 11 classes; where keys have fewer
# heads than queries, 6 heads of 8 share 2.
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
}
_WORDS: dict[str, Any] = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT: dict[str, Any] = {**_SIZES, **_WORDS, "max_position_embeddings": 37}
_GROUPED: dict[str, Any] = {**_TEXT, "num_attention_heads": 6, "num_key_value_heads": 2}
_GPT: dict[str, Any] = {**_WORDS, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": 80, "n_positions": 37}
_TWO_PARTS: dict[str, Any] = {
    **_WORDS,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 80,
    "decoder_start_token_id": 1,
}
_PATCHES: dict[str, Any] = {**_SIZES, "image_size": 40, "patch_size": 8, "num_labels": 11}
_HALF_ROTARY: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
}

TRANSFORMERS: dict[str, Recipe] = {
    # Encoders of text
    "bert": Recipe("BertConfig", "BertForMaskedLM", "text", _TEXT),
    "roberta": Recipe("RobertaConfig", "RobertaForMaskedLM", "text", _TEXT),
    "distilbert": Recipe(
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        "text",
        {**_WORDS, "dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 80, "max_position_embeddings": 37},
    ),
    "albert": Recipe("AlbertConfig", "AlbertForMaskedLM", "text", {**_TEXT, "embedding_size": 20}),
    "electra": Recipe("ElectraConfig", "ElectraForPreTraining", "text", {**_TEXT, "embedding_size": 20}),
    "deberta_v2": Recipe(
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        "text",
        {
            **_TEXT,
            "relative_attention": True,
            "position_buckets": 6,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
        },
    ),
    # Decoders of text
    "gpt2": Recipe("GPT2Config", "GPT2LMHeadModel", "text", _GPT),
    "gpt_neo": Recipe(
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        "text",
        {
            **_WORDS,
            "hidden_size": 48,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 80,
            "max_position_embeddings": 37,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 3,
        },
    ),
    "gpt_neox": Recipe("GPTNeoXConfig", "GPTNeoXForCausalLM", "text", {**_TEXT, **_HALF_ROTARY}),
    "gptj": Recipe("GPTJConfig", "GPTJForCausalLM", "text", {**_GPT, "rotary_dim": 6}),
    "opt": Recipe("OPTConfig", "OPTForCausalLM", "text", {**_TEXT, "ffn_dim": 80, "word_embed_proj_dim": 48}),
    "bloom": Recipe(
        "BloomConfig", "BloomForCausalLM", "text", {**_WORDS, "hidden_size": 48, "n_layer": 2, "n_head": 4}
    ),
    "falcon": Recipe("FalconConfig", "FalconForCausalLM", "text", {**_TEXT, "ffn_hidden_size": 80}),
    "llama": Recipe("LlamaConfig", "LlamaForCausalLM", "text", _TEXT),
    "mistral": Recipe("MistralConfig", "MistralForCausalLM", "text", {**_GROUPED, "head_dim": 8, "sliding_window": 3}),
    "mixtral": Recipe("MixtralConfig", "MixtralForCausalLM", "text", {**_GROUPED, "num_local_experts": 3}),
    "qwen2": Recipe("Qwen2Config", "Qwen2ForCausalLM", "text", _GROUPED),
    "qwen3": Recipe("Qwen3Config", "Qwen3ForCausalLM", "text", {**_GROUPED, "head_dim": 10}),
    "gemma": Recipe("GemmaConfig", "GemmaForCausalLM", "text", {**_GROUPED, "head_dim": 10}),
    "gemma2": Recipe(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        "text",
        {**_GROUPED, "head_dim": 10, "query_pre_attn_scalar": 10, "sliding_window": 3},
    ),
    "phi": Recipe("PhiConfig", "PhiForCausalLM", "text", {**_TEXT, **_HALF_ROTARY}),
    "phi3": Recipe("Phi3Config", "Phi3ForCausalLM", "text", _GROUPED),
    "stablelm": Recipe("StableLmConfig", "StableLmForCausalLM", "text", {**_GROUPED, **_HALF_ROTARY}),
    "mamba": Recipe(
        "MambaConfig",
        "MambaForCausalLM",
        "text",
        {**_WORDS, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 10, "time_step_rank": 3},
    ),
    # Encoder and decoder
    "t5": Recipe(
        "T5Config",
        "T5ForConditionalGeneration",
        "text, decoder text",
        {**_WORDS, "d_model": 48, "d_kv": 10, "d_ff": 80, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "bart": Recipe(
        "BartConfig",
        "BartForConditionalGeneration",
        "text, decoder text",
        {**_TWO_PARTS, "max_position_embeddings": 37},
    ),
    "whisper": Recipe(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        "sound, decoder text",
        {**_TWO_PARTS, "num_mel_bins": 14, "max_source_positions": 13, "max_target_positions": 37},
    ),
    # Images
    "vit": Recipe("ViTConfig", "ViTForImageClassification", "image", _PATCHES),
    "deit": Recipe("DeiTConfig", "DeiTForImageClassification", "image", _PATCHES),
    "beit": Recipe(
        "BeitConfig",
        "BeitForImageClassification",
        "image",
        {**_PATCHES, "use_relative_position_bias": True, "out_features": ["stage2"]},
    ),
    "swin": Recipe(
        "SwinConfig",
        "SwinForImageClassification",
        "image",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 24,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 11,
        },
    ),
    "convnext": Recipe(
        "ConvNextConfig",
        "ConvNextForImageClassification",
        "image",
        {"image_size": 64, "hidden_sizes": [12, 20, 28, 36], "depths": [1, 2, 1, 1], "num_labels": 11},
    ),
    "resnet": Recipe(
        "ResNetConfig",
        "ResNetForImageClassification",
        "image",
        {
            "image_size": 64,
            "embedding_size": 12,
            "hidden_sizes": [24, 40, 56, 72],
            "depths": [2, 1, 1, 1],
            "num_labels": 11,
        },
    ),
    "segformer": Recipe(
        "SegformerConfig",
        "SegformerForSemanticSegmentation",
        "image",
        {
            "image_size": 64,
            "hidden_sizes": [8, 16, 20, 36],
            "num_attention_heads": [1, 2, 5, 6],
            "depths": [2, 1, 1, 1],
            "decoder_hidden_size": 28,
            "num_labels": 11,
        },
    ),
    # Image and text
    "clip": Recipe(
        "CLIPConfig",
        "CLIPModel",
        "text, image",
        {
            "text_config": _TEXT,
            "vision_config": {**_SIZES, "hidden_size": 60, "intermediate_size": 90, "image_size": 40, "patch_size": 8},
            "projection_dim": 22,
        },
    ),
}


def _transformers(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Build a transformers model and the inputs its recipe names."""
    import torch
    import transformers

    recipe = TRANSFORMERS[name]
    config = getattr(transformers, recipe.config)(**recipe.options)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model = getattr(transformers, recipe.model)(config)
    if name == "mixtral":
        model.set_experts_implementation("batched_mm")  # the default kernel knows no float64

    def words(count: int) -> torch.Tensor:
        return torch.randint(3, 101, (5, count))  # above the special tokens

    kwargs: dict[str, torch.Tensor] = {}
    for kind in recipe.inputs.split(", "):
        if kind == "text":
            kwargs["input_ids"] = words(7)
        elif kind == "decoder text":
            kwargs["decoder_input_ids"] = words(9)
        elif kind == "sound":
            kwargs["input_features"] = torch.randn(5, config.num_mel_bins, 2 * config.max_source_positions)
        else:
            kwargs["pixel_values"] = _image(5, getattr(config, "vision_config", config).image_size)
    return model, (), kwargs
