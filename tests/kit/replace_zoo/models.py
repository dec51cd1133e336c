"""Tiny models of Hugging Face's transformers, for all classes whose configuration can be shrunk."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from replace_zoo.judge import cast, error_of, far, size_of

TOKENS, IMAGE, LARGEST = 99, 32, 20_000_000
HEADS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "text",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "text",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "pair",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "image",
}
"""The argument that models take, by the name of transformers' table of classes."""

SIZES: tuple[tuple[str, Any], ...] = (
    (r"vocab_size|.*_vocab_size", TOKENS),
    (r"pad_token_id", 0),
    (r".*_token_ids?|image_token_index", 1),
    (r"(num|n)_(hidden_)?layers?|.*_layers|n_layer|depth|layers", 2),
    (r".*(key_value|kv)_heads|n_head_kv", None),
    (r"(encoder|decoder|num|n)_?(attention|attn)?_?heads?|.*attention_heads|.*_heads|n_head", 4),
    (r".*head_dim|.*_head_dims?|d_kv|attention_head_size", 8),
    (r"hidden_size|d_model|n_embd|dim|embed_dim|.*embedding_size|model_dim|d_embed", 32),
    (r".*intermediate_size|.*ffn_dim|d_ff|n_inner|ffn_hidden_size|.*_ffn_size|hidden_dim", 64),
    (r"(num|n)_?(local|routed)?_?experts|moe_num_experts|.*num_experts", 4),
    (r"(num_)?experts_per_tok|num_experts_per_token|moe_k|top_?k", 2),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|.*window.*", 64),
    (r"image_size", IMAGE),
    (r"patch_size", 8),
    (r".*lora_rank|rank", 8),
    (r".*dropout.*|.*drop_rate|drop_path|layerdrop", 0.0),
)
"""Attributes of configurations by their whole name, and small values of them."""


def shrink(config: Any, heads: int) -> None:
    """Set the sizes of a configuration, and of the configurations in it, to small numbers.

    ``heads``: the number of heads of keys and values, for 4 heads of queries.
    """
    small = {}
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            shrink(value, heads)
            continue
        for pattern, size in SIZES:
            if type(value) in (int, float) and re.fullmatch(pattern, name):
                new = heads if size is None else size
                small[name] = new if type(new) is float else min(new, int(value))
                break
        if isinstance(value, list) and re.fullmatch(r"layer_types|mlp_layer_types", name):
            small[name] = [value[0], value[-1]] if len(value) > 1 else value
    for name, value in small.items():
        setattr(config, name, value)


def families() -> dict[str, tuple[str, str]]:
    """Types of models; for each its class with the first head of ``HEADS``, and its argument."""
    found: dict[str, tuple[str, str]] = {}
    for head, takes in HEADS.items():
        for kind, names in getattr(modeling_auto, head).items():
            made = names if isinstance(names, str) else names[0]
            found.setdefault(kind, (made, takes))
    return dict(sorted(found.items()))


def build(kind: str, heads: int) -> Any:
    """A small model with random parameters. Raises any exception if it cannot be made."""
    config_class = CONFIG_MAPPING[kind]
    config = config_class()
    shrink(config, heads)
    options = {"attn_implementation": "eager", "use_cache": False}
    config = config_class(**{**config.to_dict(), **options})
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(
            p.numel() for p in getattr(transformers, families()[kind][0])(config).parameters()
        )
    if size > LARGEST:
        raise ValueError("large")
    model = getattr(transformers, families()[kind][0])(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "bias" not in name:
            nn.init.uniform_(parameter, 0.8, 1.2)
    return model.train()


def batch(takes: str) -> dict[str, Tensor]:
    """The arguments of a call, with labels for the loss."""
    generator = torch.Generator().manual_seed(1)
    if takes == "image":
        image = torch.randn(2, 3, IMAGE, IMAGE, generator=generator)
        return {"pixel_values": image, "labels": torch.tensor([0, 1])}
    tokens = torch.randint(3, TOKENS, (2, 12), generator=generator)
    pair = {"decoder_input_ids": tokens} if takes == "pair" else {}
    return {"input_ids": tokens, "labels": tokens, **pair}


class Run:
    """Results and gradients of a training step; then the calls per module in a second forward."""

    def __init__(self, model: nn.Module, given: dict[str, Tensor]) -> None:
        torch.manual_seed(5)
        made = model(**given)
        flat = [x for x in tree_flatten(dict(made))[0] if isinstance(x, Tensor)]
        self.results = [x.detach() for x in flat]
        loss = made.get("loss")
        sums = [x.float().square().mean() for x in flat if x.is_floating_point()]
        total = torch.stack(sums).sum()
        (total if loss is None else loss + 1e-3 * total).backward()
        self.gradients = {n: p.grad for n, p in model.named_parameters()}
        self.state = torch.get_rng_state()
        self.calls: Counter[str] = Counter()
        hooks = [m.register_forward_hook(self.counted(n)) for n, m in model.named_modules()]
        with torch.no_grad():
            model(**given)
        for hook in hooks:  # OpenAI GPT shares a module of its activation between models
            hook.remove()

    def counted(self, name: str) -> Callable[..., None]:
        """A hook that counts the calls of the module ``name``."""

        def hook(*_: Any) -> None:
            self.calls[name] += 1

        return hook


def outcome(kind: str, change: Callable[[nn.Module], Any] | None = None) -> tuple[Run, Any]:
    """Change a model, run a training step; returns the run and the report of the change."""
    for heads in (2, 4):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = build(kind, heads)
                given = batch(families()[kind][1])
                report = change(model) if change else None
                dtype = next(model.parameters()).dtype
                return Run(model, {n: cast(x, dtype) for n, x in given.items()}), report
        except Exception:
            if heads == 4:
                raise
    raise AssertionError


def nudged(seed: int) -> Callable[[nn.Module], None]:
    """A change that multiplies each parameter by 1 with a random error of about a rounding."""

    @torch.no_grad()
    def nudge(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(seed)
        for x in model.parameters():
            x.mul_(1 + 6e-8 * torch.randn(x.shape, generator=generator))

    return nudge


def worst_error(run: Run, wide: Run) -> float:
    """The largest error of all gradients against float64."""
    pairs = zip(run.gradients.values(), wide.gradients.values(), strict=True)
    found = [error_of(a, b)[1] for a, b in pairs if a is not None and b is not None]
    return max(found, default=0.0)


def problems(kind: str, change: Callable[[nn.Module], Any]) -> tuple[list[str], Any]:
    """The differences between a model and its changed twin, and the report of the change."""
    one, _ = outcome(kind)
    two, report = outcome(kind, change)
    try:
        wide, _ = outcome(kind, nn.Module.double)
    except Exception:  # not every model runs in float64
        wide = one
    found = []
    if one.calls != two.calls:
        lost = {n: (c, two.calls[n]) for n, c in one.calls.items() if two.calls[n] != c}
        found.append(f"hooks were called otherwise: {lost}")
    if not torch.equal(one.state, two.state):
        found.append("random state")
    scale = size_of(g for g in one.gradients.values() if g is not None)
    # Changing parameters in the last bit moves gradients as much as another order of sums does.
    originals = [one, *(outcome(kind, nudge)[0] for nudge in map(nudged, (1, 2)))]
    worst = max(worst_error(run, wide) for run in originals)
    eps = max(4 * torch.finfo(torch.float32).eps, worst / (4 * scale) if scale else 0.0)
    rows = list(zip(one.results, two.results, wide.results, strict=True))
    texts = [far(*row, eps, size_of(one.results[:1])) for row in rows if row[0].is_floating_point()]
    found += [f"result: {text}" for text in texts if text]
    for name, g in one.gradients.items():
        other, truth = two.gradients[name], wide.gradients[name]
        if g is None or other is None or truth is None:
            if (g is None) != (other is None):
                found.append(f"gradient of {name}: {'none' if other is None else 'one'}")
        elif text := far(g, other, truth, eps, scale):
            found.append(f"gradient of {name}: {text}")
    return found, report
