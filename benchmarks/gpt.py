"""The one model of the benchmarks: a plain GPT in PyTorch, seeded, in bf16. Needs nothing but torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

HEAD_NUMEL = 64
WIDTH_MULTIPLE = 128
"""Every parameter is then a multiple of 512 bytes in fp32. At widths 576 and 704, where some are not, DeepSpeed 0.19.8
read back 1.1 of the 4 bytes of gradient a parameter that it had written, and its losses were other than everybody else's;
at 384 and 512 it read all 4 and its losses agreed. ``report.drifted`` looks at the losses of every run."""


class Block(nn.Module):
    """Pre-norm attention and MLP: 12 width**2 parameters, and some."""

    def __init__(self, width: int):
        super().__init__()
        self.heads = width // HEAD_NUMEL
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From and to shape (batch, tokens, width)."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, tokens, 3, self.heads, HEAD_NUMEL).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """``forward(ids)``, ids of shape (batch, tokens), gives the mean next-token loss."""

    def __init__(self, width: int, layers: int, vocabulary: int, tokens: int):
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1).float()
        return F.cross_entropy(logits, ids[:, 1:].flatten())


def shape_for(million: float) -> "tuple[int, int, int]":
    """(width, layers, vocabulary) of a GPT near ``million`` * 1e6 parameters.

    The width is about 40 times the layers, as in GPT-2 medium. The vocabulary is four times the width, so that the
    embeddings are no larger than the matrices of a block: DeepSpeed's buffers are as large as its largest group of whole
    parameters.
    """
    choices = []
    for width in range(WIDTH_MULTIPLE, 16384, WIDTH_MULTIPLE):
        layers = max(1, round((million * 1e6 - 8 * width**2) / (12 * width**2)))
        choices.append((abs(width / layers - 40), width, layers))
    _, width, layers = min(choices)
    return width, layers, 4 * width


def make_gpt(million: float, tokens: int, seed: int) -> GPT:
    """The same weights, in bf16, for the same arguments, in every process."""
    torch.manual_seed(seed)
    return GPT(*shape_for(million), tokens).to(torch.bfloat16)


def make_batch(million: float, batch: int, tokens: int, seed: int) -> torch.Tensor:
    """Token ids, shape (batch, tokens)."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(0, shape_for(million)[2], (batch, tokens), generator=generator)


def fill_gradients(parameters: "list[torch.Tensor]", seed: int) -> None:
    """Give every parameter a small random gradient of its own dtype: what stands in for a backward pass."""
    generator = torch.Generator().manual_seed(seed + 2)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter).normal_(0.0, 1e-3, generator=generator)
