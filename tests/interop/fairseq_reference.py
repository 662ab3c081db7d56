"""fairseq's Transformer reimplemented in plain torch: parameter names and forward pass.

Follows fairseq 3d262bb2: models/transformer/transformer_{encoder,decoder}.py, modules/transformer_layer.py,
modules/{sinusoidal,learned}_positional_embedding.py, data/dictionary.py. Dropout is left out.
"""

import argparse
import math

import torch
import torch.nn.functional as F

PAD, EOS = 1, 2


def arguments(**changes) -> argparse.Namespace:
    """The options of the model that `fairseq-train --arch transformer` saves."""
    fields = {"arch": "transformer", "source_lang": "en", "target_lang": "de", "dropout": 0.1, "activation_fn": "relu",
              "attention_dropout": 0.0, "share_all_embeddings": True, "share_decoder_input_output_embed": False,
              "max_source_positions": 40, "max_target_positions": 40, "adaptive_softmax_cutoff": None,
              "no_scale_embedding": False, "layernorm_embedding": False}  # fmt: skip
    for stack in ("encoder", "decoder"):
        fields |= {f"{stack}_layers": 2, f"{stack}_embed_dim": 16, f"{stack}_ffn_embed_dim": 20}
        fields |= {f"{stack}_attention_heads": 4, f"{stack}_normalize_before": False, f"{stack}_learned_pos": False}
    return argparse.Namespace(**fields | changes)


def random_state(args: argparse.Namespace, vocab_size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """`model.state_dict()`: all parameters random; shared ones appear under each of their names, as in fairseq."""
    generator = torch.Generator().manual_seed(seed)
    noise = lambda *shape: torch.randn(*shape, generator=generator)
    width, inner = args.encoder_embed_dim, args.encoder_ffn_embed_dim
    state = {}

    def linear(name, rows, columns):
        state[f"{name}.weight"] = noise(rows, columns) * (2 / (rows + columns)) ** 0.5 * 1.5
        state[f"{name}.bias"] = 0.3 * noise(rows)

    def norm(name):
        state[f"{name}.weight"], state[f"{name}.bias"] = 1 + 0.3 * noise(width), 0.3 * noise(width)

    table = lambda: noise(vocab_size, width) * width**-0.5 * 1.5
    shared = table()
    for stack in ("encoder", "decoder"):
        state[f"{stack}.version"] = torch.tensor([3.0])
        state[f"{stack}.embed_tokens.weight"] = shared if args.share_all_embeddings else table()
        state[f"{stack}.embed_tokens.weight"][PAD] = 0  # nn.Embedding's padding_idx
        if getattr(args, f"{stack}_learned_pos"):
            state[f"{stack}.embed_positions.weight"] = noise(args.max_source_positions + PAD + 1, width)
        else:
            state[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
        for layer in range(args.encoder_layers):
            name = f"{stack}.layers.{layer}"
            for attention in ("self_attn", "encoder_attn")[: 1 if stack == "encoder" else 2]:
                for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
                    linear(f"{name}.{attention}.{projection}", width, width)
                norm(f"{name}.{attention}_layer_norm")
            linear(f"{name}.fc1", inner, width)
            linear(f"{name}.fc2", width, inner)
            norm(f"{name}.final_layer_norm")
        if args.encoder_normalize_before:
            norm(f"{stack}.layer_norm")
    tied = args.share_all_embeddings or args.share_decoder_input_output_embed
    state["decoder.output_projection.weight"] = state["decoder.embed_tokens.weight"] if tied else table()
    return state


def forward(args, state, source: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, vocab]. `source` [B, S] ends with EOS, padded on either side; `previous` [B, T] starts with EOS."""
    padding = source == PAD
    no_padding = padding[:, None, None]
    x = _embed(args, state, "encoder", source) * ~padding[..., None]
    for layer in range(args.encoder_layers):
        name = f"encoder.layers.{layer}"
        x = _attention(args, state, f"{name}.self_attn", x, None, no_padding)
        x = _feed_forward(args, state, name, x)
    if args.encoder_normalize_before:
        x = _norm(state, "encoder.layer_norm", x)
    no_future = torch.triu(torch.ones(previous.shape[1], previous.shape[1], dtype=torch.bool), 1)[None, None]
    y = _embed(args, state, "decoder", previous)
    for layer in range(args.decoder_layers):
        name = f"decoder.layers.{layer}"
        y = _attention(args, state, f"{name}.self_attn", y, None, no_future)
        y = _attention(args, state, f"{name}.encoder_attn", y, x, no_padding)
        y = _feed_forward(args, state, name, y)
    if args.decoder_normalize_before:
        y = _norm(state, "decoder.layer_norm", y)
    return F.linear(y, state["decoder.output_projection.weight"])


def _embed(args, state, stack, tokens):
    width = args.encoder_embed_dim
    scale = 1.0 if args.no_scale_embedding else math.sqrt(width)
    mask = (tokens != PAD).int()
    positions = (torch.cumsum(mask, dim=1) * mask).long() + PAD  # fairseq.utils.make_positions
    if getattr(args, f"{stack}_learned_pos"):
        table = state[f"{stack}.embed_positions.weight"]
    else:
        table = _sinusoids(PAD + 1 + tokens.shape[1], width)
    return scale * F.embedding(tokens, state[f"{stack}.embed_tokens.weight"]) + table[positions]


def _sinusoids(rows, width):
    half = width // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(rows, dtype=torch.float)[:, None] * rates[None]
    table = torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)
    table[PAD] = 0
    return table


def _attention(args, state, name, x, memory, masked):
    """Attention to `memory` (None: self-attention) with LayerNorm and residual connection."""

    def attend(y):
        heads = lambda z: z.unflatten(-1, (args.encoder_attention_heads, -1)).transpose(1, 2)
        query = heads(_linear(state, f"{name}.q_proj", y))
        key, value = (heads(_linear(state, f"{name}.{part}_proj", y if memory is None else memory)) for part in "kv")
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
        weights = scores.masked_fill(masked, float("-inf")).softmax(-1)
        return _linear(state, f"{name}.out_proj", (weights @ value).transpose(1, 2).flatten(2))

    return _residual(args, state, f"{name}_layer_norm", x, attend)


def _feed_forward(args, state, name, x):
    inner = lambda y: _linear(state, f"{name}.fc2", F.relu(_linear(state, f"{name}.fc1", y)))
    return _residual(args, state, f"{name}.final_layer_norm", x, inner)


def _residual(args, state, norm, x, function):
    if args.encoder_normalize_before:
        return x + function(_norm(state, norm, x))
    return _norm(state, norm, x + function(x))


def _norm(state, name, x):
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-5)


def _linear(state, name, x):
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])
