"""Tiny random models that read pictures and text, with transformers' own processors around a tiny tokenizer.

SmolVLM has Idefics3's processor here, which needs fewer packages and writes the same tokens. Qwen's and InternVL's are
for pictures only: transformers' video processors need torchvision. Mistral's processor needs it too; its encodings are
made by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from tests.helpers.tiny import randomise

WORDS = ("what", "is", "this", "?", "a", "red", "blue", "square", "the", "user", "assistant", ":", ".", "one", "two")
NAMED = {  # tokens that processors look up as attributes of the tokenizer
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
FURTHER = (
    "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
    "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<image_soft_token>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)  # fmt: skip
IMAGE_TOKENS = {
    "gemma3": "<image_soft_token>",
    "internvl": "<IMG_CONTEXT>",
    "mistral3": "[IMG]",
    "qwen2_vl": "<|image_pad|>",
    "qwen2_5_vl": "<|image_pad|>",
    "qwen3_vl": "<|image_pad|>",
}
TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }} : {% for part in turn.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)
Config = dict[str, Any]
TEXT: Config = {
    "vocab_size": 90, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "head_dim": 8,
}  # fmt: skip
VISION: Config = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
ROPE: Config = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1]}
QWEN_TEXT = TEXT | {"rope_parameters": ROPE, "head_dim": 6}
QWEN_VISION: Config = {
    "depth": 2, "hidden_size": 16, "out_hidden_size": 24, "num_heads": 2, "intermediate_size": 24, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
CLIP, SIGLIP = VISION | {"model_type": "clip_vision_model"}, VISION | {"model_type": "siglip_vision_model"}
LLAMA, QWEN2 = TEXT | {"model_type": "llama"}, TEXT | {"model_type": "qwen2"}
CANVASES = [[16, 32], [32, 16], [32, 32]]
SIZE = {"height": 16, "width": 16}
CONFIGS: dict[str, Config] = {
    "llava": {"vision_config": CLIP, "text_config": LLAMA},
    "gemma3": {
        "vision_config": VISION | {"vision_use_head": False},
        "text_config": TEXT | {"query_pre_attn_scalar": 10, "sliding_window": 64},
        "mm_tokens_per_image": 4,
    },
    "paligemma": {
        "vision_config": VISION | {"projection_dim": 24},
        "text_config": TEXT | {"vocab_size": 1300, "model_type": "gemma"},
        "projection_dim": 24,
        "hidden_size": 24,
    },
    "qwen2_vl": {
        "vision_config": QWEN_VISION | {"embed_dim": 16, "hidden_size": 24, "mlp_ratio": 2},
        "text_config": QWEN_TEXT,
    },
    "qwen2_5_vl": {
        "vision_config": QWEN_VISION | {"window_size": 16, "fullatt_block_indexes": [1]},
        "text_config": QWEN_TEXT,
    },
    "qwen3_vl": {
        "vision_config": QWEN_VISION | {"depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        "text_config": QWEN_TEXT | {"num_hidden_layers": 4},
    },
    "idefics3": {"vision_config": VISION, "text_config": LLAMA, "scale_factor": 2},
    "smolvlm": {"vision_config": VISION, "text_config": LLAMA, "scale_factor": 2},
    "internvl": {
        "vision_config": VISION | {"image_size": [16, 16], "patch_size": [4, 4]},
        "text_config": QWEN2,
        "image_seq_length": 4,
        "downsample_ratio": 0.5,
    },
    "llava_next": {"vision_config": CLIP, "text_config": LLAMA, "image_grid_pinpoints": CANVASES},
    "llava_onevision": {
        "vision_config": SIGLIP,
        "text_config": QWEN2,
        "image_grid_pinpoints": CANVASES,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "mistral3": {
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
        "text_config": TEXT | {"model_type": "mistral"},
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    },
}
CLASSES = {
    "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "paligemma": "PaliGemma",
    "smolvlm": "SmolVLM", "internvl": "InternVL", "llava_next": "LlavaNext", "llava_onevision": "LlavaOnevision",
}  # fmt: skip
KINDS = tuple(CONFIGS)


@dataclass(frozen=True)
class PictureModel:
    """A model with its processor, and what it writes where a picture goes."""

    model: PreTrainedModel
    processor: Any
    placeholder: str

    def ask(self, *images: Any, text: str = "what is this ?") -> dict[str, Any]:
        """A question about pictures."""
        return {"text": f"the user : {' and '.join([self.placeholder] * len(images))} {text}", "images": list(images)}


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words with the special tokens of every processor."""
    vocabulary = {name: n for n, name in enumerate(("<pad>", "<bos>", "<eos>", "<unk>", "and", *WORDS))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    named = NAMED | {"image_token": IMAGE_TOKENS.get(kind, "<image>")}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        extra_special_tokens=named, chat_template=TEMPLATE,
    )  # fmt: skip
    fast.add_tokens([name for name in FURTHER if name not in fast.get_vocab()], special_tokens=True)
    return fast


def _processor(kind: str, tokenizer: Any) -> Any:
    """The processor of a type, at the sizes of `CONFIGS`."""
    t: Any = transformers
    crop: Config = {"crop_size": SIZE, "size": {"shortest_edge": 16}}
    first: Config = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    match kind:
        case "llava":
            return t.LlavaProcessor(t.CLIPImageProcessorPil(**crop), tokenizer, **first)
        case "gemma3":
            return t.Gemma3Processor(t.Gemma3ImageProcessorPil(size=SIZE), tokenizer, image_seq_length=4)
        case "paligemma":
            images = t.SiglipImageProcessorPil(size=SIZE)
            images.image_seq_length = 16
            return t.PaliGemmaProcessor(images, tokenizer)
        case "qwen2_vl" | "qwen2_5_vl" | "qwen3_vl":
            sizes = {"shortest_edge": 64, "longest_edge": 4096}
            images = t.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=sizes)
            return _without_video(getattr(t, f"{CLASSES[kind]}Processor"))(images, tokenizer, None)
        case "idefics3" | "smolvlm":
            edges = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
            return t.Idefics3Processor(t.Idefics3ImageProcessorPil(**edges), tokenizer, image_seq_len=4)
        case "internvl":
            images = t.GotOcr2ImageProcessorPil(size=SIZE, crop_to_patches=True, min_patches=1, max_patches=6)
            return _without_video(t.InternVLProcessor)(images, tokenizer, None, image_seq_length=4)
        case "llava_next":
            images = t.LlavaNextImageProcessorPil(image_grid_pinpoints=CANVASES, **crop)
            return t.LlavaNextProcessor(images, tokenizer, **first)
        case "llava_onevision":
            images = t.LlavaOnevisionImageProcessorPil(image_grid_pinpoints=CANVASES, size=SIZE)
            options = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
            return _without_video(t.LlavaOnevisionProcessor)(images, tokenizer, None, **options)
    return None


def _without_video(cls: type) -> Any:
    """The processor for pictures only."""
    own = {"check_argument_for_proper_class": lambda self, name, given: None, "video_processor": None}
    return type(cls.__name__, (cls,), own)


def picture_model(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any) -> PictureModel:
    """A tiny random model of a type that reads pictures, in evaluation mode, with eager attention."""
    if not hasattr(transformers, "CLIPImageProcessorPil"):
        pytest.skip("the processors of this version of transformers need torchvision")
    tokenizer = tokenizer_of(kind)
    processor = _processor(kind, tokenizer)
    token = IMAGE_TOKENS.get(kind, "<image>")
    number = tokenizer.convert_tokens_to_ids(token)
    name = f"{CLASSES.get(kind, kind.capitalize())}ForConditionalGeneration"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ids = {"image_token_id": number, "image_token_index": number}
        config = AutoConfig.for_model(kind, **(CONFIGS[kind] | overrides), **ids)
        config._attn_implementation = "eager"
        model: PreTrainedModel = getattr(transformers, name)(config).double()
        randomise(model)
    return PictureModel(model.to(dtype).eval(), processor, getattr(processor, "image_token", token))


def picture(width: int = 32, height: int = 16, seed: int = 0) -> Image.Image:
    """A picture of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def mistral_encoding(model: PictureModel, image: Image.Image) -> Mapping[str, Any]:
    """What Mistral's processor makes of a question about a picture: a line of tokens for each row of merged patches."""
    options = {"size": {"longest_edge": 32}, "patch_size": {"height": 8, "width": 8}}
    processor: Any = transformers.PixtralImageProcessorPil(**options)  # type: ignore[attr-defined]
    pixels = processor(image, return_tensors="pt")
    down, across = (int(edge) // 8 for edge in pixels["image_sizes"][0])
    lines = ["[IMG]" * across] * down
    tokens = tokenizer_of("mistral3")(f"the user : {'[IMG_BREAK]'.join(lines)}[IMG_END] what is this ?")
    return {**{key: torch.tensor(one)[None] for key, one in tokens.items()}, **pixels}
