"""A byte-level GPT in plain PyTorch: pre-norm blocks of causal attention and a GELU MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["GPT", "GPTConfig"]

VOCABULARY = 256  # one token a byte


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model: `dim` must be a multiple of `heads`."""

    layers: int
    dim: int
    heads: int
    context: int


class Attention(nn.Module):
    """Causal self-attention; query, key and value in one projection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, context, dim) to the same."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.dim)
        self.attn = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.down = nn.Linear(4 * config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, context, dim) to the same."""
        x = x + self.attn(self.attn_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, config.dim)
        self.position_embedding = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Residual branches start small, so that depth does not add up.
                branch = name.endswith(("proj.weight", "down.weight"))
                std = 0.02 / (2 * config.layers) ** 0.5 if branch else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, context) int64 to (batch, context, 256) logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))

    def loss(self, window: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in nats a byte of (batch, context + 1) bytes."""
        logits = self(window[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
