"""PyTorch's side of `benchmarks.training`: our model made of torch's own layers, and its training step.

Attention has no biases, and there are no norms behind the stacks, so that both sides have the same parameters.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, np.ndarray]

# torch's names → those of `t2t_jax.interop.torch_names`
_BOTH = {"linear1": "fc1", "linear2": "fc2", "multihead_attn": "encoder_attn", "norm1": "self_attn_layer_norm"}
_NAMES = {
    "encoder": _BOTH | {"norm2": "final_layer_norm"},
    "decoder": _BOTH | {"norm2": "encoder_attn_layer_norm", "norm3": "final_layer_norm"},
}


class Transformer(nn.Module):
    """The model of `config.model`, for sentences of at most `longest` subwords."""

    def __init__(self, shape: Mapping[str, Any], vocab_size: int, longest: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, shape["d_model"])
        layers = range(shape["num_layers"])
        self.encoder = nn.ModuleList(_layer(nn.TransformerEncoderLayer, shape) for _ in layers)
        self.decoder = nn.ModuleList(_layer(nn.TransformerDecoderLayer, shape) for _ in layers)
        self.dropout = nn.Dropout(shape["dropout"])
        self.register_buffer("positions", _sinusoids(longest, shape["d_model"]), persistent=False)
        self.register_buffer("ahead", torch.ones(longest, longest).triu(1).bool(), persistent=False)

    def forward(self, inputs: Tensor, targets: Tensor, input_pads: Tensor | None, target_pads: Tensor | None) -> Tensor:
        """Logits; the masks, True at padding, may be left out where nothing real sees padding."""
        x = self._embed(self._vectors(inputs))
        for layer in self.encoder:
            x = layer(x, src_key_padding_mask=input_pads)
        y = self._embed(F.pad(self._vectors(targets[:, :-1]), (0, 0, 1, 0)))
        ahead = self.ahead[: targets.shape[1], : targets.shape[1]]
        for layer in self.decoder:
            y = layer(y, x, ahead, None, target_pads, input_pads, tgt_is_causal=True)
        return F.linear(y, self.embedding.weight)

    def _vectors(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)

    def _embed(self, vectors: Tensor) -> Tensor:
        return self.dropout(vectors + self.positions[: vectors.shape[1]])

    def read(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes over parameters of these names."""
        found = {name: torch.from_numpy(np.array(_find(name, state))) for name in self.state_dict()}
        self.load_state_dict(found)


def _layer(kind: type[nn.Module], shape: Mapping[str, Any]) -> nn.Module:
    """A layer that drops what ours does: the outputs of sub-layers, neither weights of attention nor hidden units."""
    width, heads = shape["d_model"], shape["num_heads"]
    layer = kind(
        width, heads, shape["d_ff"], shape["dropout"], layer_norm_eps=shape["layer_norm_epsilon"], batch_first=True
    )
    layer.dropout = nn.Identity()
    for name in ("self_attn", "multihead_attn"):
        if hasattr(layer, name):
            setattr(layer, name, nn.MultiheadAttention(width, heads, bias=False, batch_first=True))
    return layer


def _sinusoids(length: int, width: int) -> Tensor:
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
    return torch.from_numpy(np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, width).astype(np.float32))


def _find(name: str, state: Mapping[str, np.ndarray]) -> np.ndarray:
    stack, index, *rest = name.split(".")
    if stack == "embedding":
        return state["embed_tokens.weight"]
    prefix, (module, *end) = f"{stack}.layers.{index}", rest
    prefix = f"{prefix}.{_NAMES[stack].get(module, module)}"
    if end == ["in_proj_weight"]:
        return np.concatenate([state[f"{prefix}.{projection}_proj.weight"] for projection in "qkv"])
    return state[".".join([prefix, *end])]


class Trainer:
    """The model, Adam and how a step is taken.

    `tuned`: Adam in one kernel, and no mask without which nothing real would see padding; otherwise as one would write
    it first. bfloat16 is autocast's. Float32 products may use TF32 where there is such a thing, as XLA's do.
    """

    def __init__(self, model: Transformer, *, label_smoothing: float, dtype: str, tuned: bool, compiled: bool):
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model, self._label_smoothing, self._tuned = model.to(self._device), label_smoothing, tuned
        self._dtype, self._forward = getattr(torch, dtype), torch.compile(self._loss) if compiled else self._loss
        fused = {"fused": True} if tuned else {}
        self._adam = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, **fused)
        torch.backends.cuda.matmul.allow_tf32 = True

    def put(self, batch: Batch) -> dict[str, Tensor | None]:
        """The arguments of the model, on the device."""
        ids = {name: torch.from_numpy(batch[name].astype(np.int64)).to(self._device) for name in ("inputs", "targets")}
        pads = {"input_pads": ids["inputs"] == 0, "target_pads": ids["targets"] == 0}
        if self._tuned:
            # Padding is on the right: with the causal mask, no real target sees any.
            pads = {"input_pads": pads["input_pads"] if pads["input_pads"].any() else None, "target_pads": None}
        return ids | pads

    def train(self, batches: list[dict[str, Tensor | None]]) -> float:
        """A step for each batch; the last one's loss."""
        for batch in batches:
            loss = self._gradients(batch, self._forward)
            self._adam.step()
        self._wait()
        return float(loss)

    def check(self, batch: dict[str, Tensor | None]) -> tuple[float, float]:
        """(loss, norm of the gradients) without dropout, compilation and TF32."""
        torch.backends.cuda.matmul.allow_tf32 = False
        self._model.eval()
        loss = self._gradients(batch, self._loss)
        norm = torch.sqrt(sum(p.grad.square().sum() for p in self._model.parameters()))
        self._model.train()
        torch.backends.cuda.matmul.allow_tf32 = True
        return float(loss), float(norm)

    def products(self, width: int, count: int) -> None:
        """Products of two square matrices."""
        x = torch.randn(width, width, device=self._device, dtype=self._dtype)
        for _ in range(count):
            x @ x
        self._wait()

    def _gradients(self, batch: dict[str, Tensor | None], forward: Callable[..., Tensor]) -> Tensor:
        """The loss, its gradients left in the parameters."""
        self._adam.zero_grad(set_to_none=True)
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            loss = forward(**batch)
        loss.backward()
        return loss.detach()

    def _loss(self, **batch: Tensor | None) -> Tensor:
        logits = self._model(**batch).flatten(0, 1)
        targets = batch["targets"].flatten()
        return F.cross_entropy(logits, targets, ignore_index=0, label_smoothing=self._label_smoothing)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
