"""The models of docs/model_times.py: classes of transformers, their sizes, and batches.

Parameters are random. ``tiny`` shrinks all sizes, for a test on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchkiln

TINY: dict[str, Any] = {
    "vocab_size": 99,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "encoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "num_mel_bins": 8,
    "image_size": 64,
    "max_source_positions": 16,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 32, 64],
    "window_size": 4,
}
"""Small values of the options of configurations."""


@dataclass(frozen=True)
class Model:
    """A model and its batch."""

    title: str
    cls: str
    config: str
    options: Mapping[str, Any]
    batch: tuple[int, int]
    """Sequences and tokens, or images and their height."""
    takes: str = "tokens"
    """What the model takes: ``tokens``, ``images`` or ``sounds``."""

    def build(self, device: torch.device, *, tiny: bool = False, column: str = "") -> nn.Module:  # noqa: ARG002
        """The model in bfloat16, in training mode; it is the same for all columns."""
        import transformers  # noqa: PLC0415  an optional package

        names = self.options if tiny else ()
        options = {**self.options, **{k: v for k, v in TINY.items() if k in names}}
        config = getattr(transformers, self.config)(**options)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        torch.manual_seed(0)
        with torch.device(device):
            model: nn.Module = self.model_class()(config)
        return model.to(torch.bfloat16).train()

    def model_class(self) -> Any:
        """The class of transformers."""
        place, _, name = self.cls.rpartition(".")
        path = f"transformers.models.{place}" if place else "transformers"
        return getattr(import_module(path), name)

    def inputs(
        self, device: torch.device, *, tiny: bool = False, batch: int = 0, length: int = 0
    ) -> dict[str, Tensor]:
        """The arguments of a call; another number of sequences or tokens if given."""
        count, size = (2, 16) if tiny else self.batch
        count, size = batch or count, length or size
        drawn = torch.Generator(device).manual_seed(1)
        if self.takes == "tokens":
            most = TINY["vocab_size"] if tiny else self.options["vocab_size"]
            tokens = torch.randint(most, (count, size), device=device, generator=drawn)
            return {"input_ids": tokens, "labels": tokens.clone()}
        if self.takes == "sounds":
            bins = (TINY if tiny else self.options)["num_mel_bins"]
            shape: tuple[int, ...] = (count, bins, 32 if tiny else size)
            name = "input_features"
        else:
            height = TINY["image_size"] if tiny else size
            shape, name = (count, 3, height, height), "pixel_values"
        x = torch.randn(shape, device=device, generator=drawn).to(torch.bfloat16)
        if self.takes == "sounds":
            return {name: x}
        return {name: x, "labels": torch.arange(count, device=device) % 2}


class Blocks(nn.Module):
    """A Llama of :class:`torchkiln.nn.TransformerBlock`, whose blocks, and head, may be in FP8."""

    def __init__(self, options: Mapping[str, Any], *, fp8: bool, fp8_head: bool) -> None:
        super().__init__()
        precision: Any = "fp8" if fp8 else None
        dim, size = options["hidden_size"], options["intermediate_size"]
        heads = options["num_attention_heads"], options["num_key_value_heads"]
        self.tokens = nn.Embedding(options["vocab_size"], dim)
        layers = range(options["num_hidden_layers"])
        block = torchkiln.nn.TransformerBlock
        self.layers = nn.ModuleList(
            block(dim, *heads, None, size, precision=precision) for _ in layers
        )
        self.norm = torchkiln.nn.AddRMSNorm(dim)
        layer = torchkiln.nn.LinearFP8 if fp8_head else nn.Linear
        self.head = layer(dim, options["vocab_size"], bias=False)
        angles = torchkiln.nn.RotaryEmbedding(dim // heads[0], LENGTH)
        self.angles = angles.cos.float(), angles.sin.float()  # no buffers: they stay float32

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of the next tokens."""
        x, residual = self.tokens(input_ids), None
        cos, sin = (table[: input_ids.shape[1]] for table in self.angles)
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin)
        logits = self.head(self.norm(x, residual)[0]).flatten(0, 1)
        target = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        loss = torchkiln.cross_entropy(logits, target, loss_dtype=torch.float32)
        return {"loss": loss}


class OwnModel(Model):
    """A model without transformers."""

    def build(self, device: torch.device, *, tiny: bool = False, column: str = "") -> nn.Module:
        """The model in bfloat16, in training mode; that of the columns ``fp8`` is in FP8."""
        options = {**self.options, **({k: TINY[k] for k in self.options} if tiny else {})}
        words = {"fp8": column in {"fp8", "fp8 head"}, "fp8_head": column == "fp8 head"}
        torch.manual_seed(0)
        with torch.device(device):
            return Blocks(options, **words).to(torch.bfloat16).train()

    def model_class(self) -> Any:
        """The class."""
        return Blocks


def loss_of(result: Any) -> Tensor:
    """The loss of a result, or the mean square of a model without a loss."""
    loss = result.get("loss")
    if loss is None:
        loss = result.last_hidden_state.float().square().mean()
    return loss


def model(
    title: str,
    cls: str,
    config: str,
    batch: tuple[int, int],
    takes: str = "tokens",
    /,
    **options: Any,
) -> Model:
    """A model with the options of its configuration."""
    return Model(title, cls, config, options, batch, takes)


def sized(hidden: int, layers: int, heads: int, between: int, **others: Any) -> dict[str, Any]:
    """Options with the names that most configurations have for these sizes."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": between,
        **others,
    }


def llama(layers: int) -> dict[str, Any]:
    """The sizes of Llama 3 8B."""
    return sized(4096, layers, 32, 14336, num_key_value_heads=8, vocab_size=128256, **LONG)


LENGTH = 8192
LONG = {
    "max_position_embeddings": LENGTH,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
GPT2 = {"vocab_size": 50257, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
LLAMA = "LlamaForCausalLM", "LlamaConfig"
VIT = "ViTForImageClassification", "ViTConfig"

MODELS: dict[str, Model] = {
    "llama": model("Llama 3 8B, 4 of its layers, 4 x 4096 tokens", *LLAMA, (4, 4096), **llama(4)),
    "qwen3": model(
        "Qwen3, 8 layers of 2048, 4 x 4096 tokens",
        *("Qwen3ForCausalLM", "Qwen3Config"),
        (4, 4096),
        **sized(2048, 8, 16, 6144, num_key_value_heads=8, head_dim=128, vocab_size=151936),
        **LONG,
        tie_word_embeddings=True,
    ),
    "gpt2": model(
        "GPT-2 medium without dropout, 8 x 1024 tokens",
        *("GPT2LMHeadModel", "GPT2Config"),
        (8, 1024),
        **GPT2,
        n_embd=1024,
        n_layer=24,
        n_head=16,
    ),
    "bert": model(
        "BERT-large with its masked loss, 32 x 512 tokens",
        *("BertForMaskedLM", "BertConfig"),
        (32, 512),
        **sized(1024, 24, 16, 4096, vocab_size=30522, attention_probs_dropout_prob=0.0),
    ),
    "vit": model(
        "ViT-L, 128 images",
        *VIT,
        (128, 224),
        "images",
        **sized(1024, 24, 16, 4096, image_size=224, num_labels=1000),
    ),
    "gemma3": model(
        "Gemma 3 1B, 12 of its layers, 4 x 2048 tokens",
        *("Gemma3ForCausalLM", "Gemma3TextConfig"),
        (4, 2048),
        **sized(1152, 12, 4, 6912, num_key_value_heads=1, head_dim=256, vocab_size=262144),
        sliding_window=512,
    ),
    "olmo2": model(
        "OLMo 2, 8 layers of 2048, 4 x 2048 tokens",
        *("Olmo2ForCausalLM", "Olmo2Config"),
        (4, 2048),
        **sized(2048, 8, 16, 8192, num_key_value_heads=16, vocab_size=100352),
        **LONG,
    ),
    "t5": model(
        "T5 1.1 base without dropout, 16 x 512 tokens",
        *("T5ForConditionalGeneration", "T5Config"),
        (16, 512),
        vocab_size=32128,
        d_model=768,
        d_ff=2048,
        num_layers=12,
        num_heads=12,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    "whisper": model(
        "encoder of Whisper medium, 16 sounds of 30 s",
        *("whisper.modeling_whisper.WhisperEncoder", "WhisperConfig"),
        (16, 3000),
        "sounds",
        d_model=1024,
        encoder_layers=24,
        encoder_attention_heads=16,
        encoder_ffn_dim=4096,
        num_mel_bins=80,
        max_source_positions=1500,
    ),
    "swinv2": model(
        "Swin V2 base without dropped paths, 64 images",
        *("Swinv2ForImageClassification", "Swinv2Config"),
        (64, 256),
        "images",
        embed_dim=128,
        depths=[2, 2, 18, 2],
        num_heads=[4, 8, 16, 32],
        window_size=8,
        image_size=256,
        drop_path_rate=0.0,
        num_labels=1000,
    ),
    "convnext": model(
        "ConvNeXt base, 64 images",
        *("ConvNextForImageClassification", "ConvNextConfig"),
        (64, 224),
        "images",
        depths=[3, 3, 27, 3],
        hidden_sizes=[128, 256, 512, 1024],
        image_size=224,
        num_labels=1000,
    ),
    "blocks": OwnModel(
        "4 layers of Llama 3 8B from torchkiln.nn.TransformerBlock, 4 x 4096 tokens",
        *("", ""),
        sized(4096, 4, 32, 14336, num_key_value_heads=8, vocab_size=128256),
        (4, 4096),
    ),
    "llama2layers": model(
        "Llama 3 8B, 2 of its layers, one sequence", *LLAMA, (1, 4096), **llama(2)
    ),
    "gpt2small": model(
        "GPT-2 small without dropout, sequences of 512 tokens",
        *("GPT2LMHeadModel", "GPT2Config"),
        (1, 512),
        **GPT2,
        n_embd=768,
        n_layer=12,
        n_head=12,
    ),
    "vits": model(
        "ViT-S, images of 224 x 224",
        *VIT,
        (1, 224),
        "images",
        **sized(384, 12, 6, 1536, image_size=224, num_labels=1000),
    ),
}
