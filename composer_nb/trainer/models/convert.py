"""Make a checkpoint to start training from: from GGUF or a folder, upcycled to experts, with a chat format's tokens."""

import copy
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer

from composer_nb.harness.agent.formats import FORMATS
from composer_nb.trainer.models.checkpoint import empty_model, hugging_face_views, load_pretrained, save_pretrained
from composer_nb.trainer.models.companions import for_format
from composer_nb.trainer.models.config import Family, ModelConfig
from composer_nb.trainer.models.tokenizer import tokenizer_of
from composer_nb.trainer.models.transformer import Model

# The family with experts whose attention is that of a dense family.
SPARSE: dict[Family, Family] = {"llama": "mixtral", "qwen3": "qwen3_moe"}


def read_model(source: Path) -> tuple[Model, Tokenizer]:
    """Return the model, in float32, and the tokenizer of a GGUF file or a checkpoint folder. Raises as `load_pretrained` and
    `tokenizer_of` do."""
    model = load_pretrained(source)
    return model, tokenizer_of(model, source)


def convert(
    source: Path, out: Path, *, experts: int = 0, chosen: int = 2, noise: float = 0.0, format: str = "", seed: int = 0
) -> ModelConfig:
    """Write the model in `source` to the checkpoint folder `out` and return its configuration.

    `experts`, `chosen`, `noise`, `seed`: see `upcycle`; 0 experts leaves the model as it is. `format`: chat format whose missing
    tokens are added. Raises as `read_model`, `upcycle` and `with_format` do."""
    model, tokenizer = read_model(source)
    if format:
        model, tokenizer = with_format(model, tokenizer, format)
        model.companions = for_format(model.companions, tokenizer, format, trained=False)
    if experts:
        model = upcycle(model, experts, chosen, noise, seed)
    save_pretrained(model, out)
    return model.config


@torch.no_grad()
def upcycle(model: Model, experts: int, chosen: int, noise: float = 0.0, seed: int = 0) -> Model:
    """Return a mixture of experts whose logits are those of the dense `model`: each expert is a copy of the layer's MLP, and the
    gates of a token add up to 1 (sparse upcycling, arXiv 2212.05055).

    `experts` of each layer, of which a token uses `chosen`. Routers are drawn at random. `noise` is added to each expert, in
    standard deviations of its weights, so that copies differ from the first step; above 0 the logits change. Raises ValueError
    for a family without a counterpart that has experts."""
    c = model.config
    if c.family not in SPARSE:
        raise ValueError(f"model.family={c.family} has no counterpart with experts, only {', '.join(SPARSE)} have")
    if noise < 0:
        raise ValueError(f"noise={noise} must be at least 0")
    config = replace(
        c,
        family=SPARSE[c.family],
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=c.intermediate_size,
        intermediate_size=0,
    )
    sparse = empty_model(config, model.embed.dtype)
    sparse.companions = model.companions
    routers, noises = (torch.Generator().manual_seed(seed) for _ in range(2))
    dense_weights = dict(model.named_parameters())
    for name, weight in sparse.named_parameters():
        source = dense_weights.get(name.replace("w_in", "dense_in").replace("w_out", "dense_out"))
        if source is None:  # a router
            weight.copy_(torch.randn(weight.shape, generator=routers) * c.hidden_size**-0.5)
            continue
        weight.copy_(source)  # a dense MLP to each of the experts
        if noise and name not in dense_weights:
            weight.add_(torch.randn(weight.shape, generator=noises) * (noise * source.std()))
    return sparse


@torch.no_grad()
def with_format(model: Model, tokenizer: Tokenizer, format: str) -> tuple[Model, Tokenizer]:
    """Return the model and the tokenizer with the tokens that a chat format needs. The row of a new token is the mean of the rows
    of the pieces that spelt it before: the model writes it about where it would have written its text, while the mean of all
    rows is no more probable in one place than in another, and short training does not change that. Raises ValueError for an
    unknown format."""
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is unknown, there are {', '.join(FORMATS)}")
    plain, tokenizer, tokens = tokenizer, copy.deepcopy(tokenizer), FORMATS[format].tokens
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    if not (new := [token for token in tokens if plain.token_to_id(token) is None]):
        return model, tokenizer
    size = max(model.config.vocab_size, tokenizer.get_vocab_size())
    grown = empty_model(replace(model.config, vocab_size=size), model.embed.dtype)
    grown.companions = model.companions
    old_views = hugging_face_views(model)
    for name, view in hugging_face_views(grown).items():  # biases of routers too, which are no parameters
        view[: len(old_views[name])] = old_views[name]
        for token in new if name in ("model.embed_tokens.weight", "lm_head.weight") else ():
            pieces = plain.encode(token, add_special_tokens=False).ids or slice(None)
            view[tokenizer.token_to_id(token)] = old_views[name][pieces].mean(0)
    return grown, tokenizer
