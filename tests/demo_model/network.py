"""Qwen3-VL's computation in plain torch, for training: whole batches of pictures of one size, no padding in between.

Owns the modules, named as the checkpoint names them, and their start values. Leaves to others: serving (vLLM),
generating (transformers). `test_network.py` holds it equal to transformers' implementation.
Sources: transformers' modeling_qwen3_vl.py; DeepStack (arXiv 2406.04334).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.demo_model.architecture import MERGE, PATCH, Architecture

_NEVER = -1e9  # a score after which softmax gives nothing


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, unseen: Tensor | None = None) -> Tensor:
    """Attention by plain products: under bfloat16 autocast two to four times as fast on CPUs as torch's fused one.

    Args:
        q: [batch, heads, length, head_dim].
        k, v: [batch, kv heads, length, head_dim]; heads share them in groups.
        unseen: added to the scores: a large negative number where a token may not look.

    Returns:
        [batch, heads, length, head_dim].
    """
    batch, heads, length, width = q.shape
    groups = k.shape[1]
    scores = (q * width**-0.5).reshape(batch, groups, -1, width) @ k.mT
    scores = scores.view(batch, heads, length, length)
    shares = (scores if unseen is None else scores + unseen).softmax(dim=-1)
    return (shares.view(batch, groups, -1, length) @ v).view(q.shape)


@functools.lru_cache(maxsize=64)
def grid_places(rows: int, columns: int) -> Tensor:
    """[patches, 2] (row, column), in the order of the processor: blocks of MERGE x MERGE patches."""
    places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
    blocks = places.view(rows // MERGE, MERGE, columns // MERGE, MERGE, 2)
    return blocks.permute(0, 2, 1, 3, 4).reshape(-1, 2)


@functools.lru_cache(maxsize=64)
def _position_mix(rows: int, columns: int, side: int) -> Tensor:
    """[patches, side * side]: how learned positions are mixed, bilinear with aligned corners."""
    places = grid_places(rows, columns).float()
    axes = []
    for axis, length in enumerate((rows, columns)):
        at = places[:, axis] * ((side - 1) / max(length - 1, 1))
        low = at.floor().clamp(max=side - 2) if side > 1 else at
        weights = torch.zeros(len(at), side)
        weights[torch.arange(len(at)), low.long()] = 1 - (at - low)
        weights[torch.arange(len(at)), low.long() + 1] = at - low
        axes.append(weights)
    return (axes[0][:, :, None] * axes[1][:, None, :]).reshape(len(places), side * side)


@functools.lru_cache(maxsize=64)
def _vision_angles(rows: int, columns: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin, [patches, head_dim / 2]: the first half turns with the row, the second with the column."""
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim // 2, 2).float() / (head_dim // 2))
    angles = (grid_places(rows, columns)[:, :, None].float() * frequencies).flatten(1)
    return angles.cos(), angles.sin()


class VisionAttention(nn.Module):
    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.heads = sizes.vision_heads
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.proj = nn.Linear(sizes.hidden, sizes.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pictures, patches, _ = x.shape
        qkv = self.qkv(x).view(pictures, patches, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = _rotated(qkv[:2], cos, sin).unbind(0)
        mixed = attend(q, k, qkv[2])
        return self.proj(mixed.transpose(1, 2).reshape(x.shape))


class VisionMLP(nn.Module):
    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(sizes.hidden, sizes.intermediate)
        self.linear_fc2 = nn.Linear(sizes.intermediate, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.hidden, eps=sizes.epsilon)
        self.norm2 = nn.LayerNorm(sizes.hidden, eps=sizes.epsilon)
        self.attn = VisionAttention(sizes)
        self.mlp = VisionMLP(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """MERGE x MERGE patches → one token; `late`: the norm sees the joined patches (DeepStack's mergers)."""

    def __init__(self, sizes: Architecture, late: bool) -> None:
        super().__init__()
        self.late, self.joined = late, sizes.hidden * MERGE**2
        self.norm = nn.LayerNorm(self.joined if late else sizes.hidden, eps=sizes.epsilon)
        self.linear_fc1 = nn.Linear(self.joined, self.joined)
        self.linear_fc2 = nn.Linear(self.joined, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        pictures = x.shape[0]
        x = self.norm(x.reshape(pictures, -1, self.joined) if self.late else x).reshape(pictures, -1, self.joined)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class _PatchEmbed(nn.Module):
    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, sizes.hidden, (2, PATCH, PATCH), (2, PATCH, PATCH))

    def forward(self, patches: Tensor) -> Tensor:
        # Both frames of a still picture are the same: one product instead of two.
        return F.linear(patches, self.proj.weight.sum(2).flatten(1), self.proj.bias)


class Vision(nn.Module):
    """The vision tower."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.sizes = sizes
        self.patch_embed = _PatchEmbed(sizes)
        self.pos_embed = nn.Embedding(sizes.positions_per_side**2, sizes.hidden)
        self.blocks = nn.ModuleList(VisionBlock(sizes) for _ in range(sizes.vision_layers))
        self.merger = Merger(sizes, late=False)
        self.deepstack_merger_list = nn.ModuleList([Merger(sizes, late=True)])

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Encode pictures of one size.

        Args:
            patches: [pictures, rows * columns, 3 * PATCH * PATCH], one frame.
            grid: (rows, columns) of patches.

        Returns:
            Features and DeepStack features, each [pictures, tokens, hidden].
        """
        x = self.patch_embed(patches).float()
        x = x + (_position_mix(*grid, self.sizes.positions_per_side) @ self.pos_embed.weight).float()
        cos, sin = _vision_angles(*grid, self.sizes.hidden // self.sizes.vision_heads)
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin)
            if index == self.sizes.deepstack:
                deep = self.deepstack_merger_list[0](x)
        return self.merger(x).float(), deep.float()


class TextAttention(nn.Module):
    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden, sizes.text_heads * width, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, sizes.text_kv_heads * width, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, sizes.text_kv_heads * width, bias=False)
        self.o_proj = nn.Linear(sizes.text_heads * width, sizes.hidden, bias=False)
        self.q_norm = nn.RMSNorm(width, eps=sizes.epsilon)
        self.k_norm = nn.RMSNorm(width, eps=sizes.epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, unseen: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = (batch, length, -1, self.sizes.head_dim)
        q = _rotated(self.q_norm(self.q_proj(x).float().view(split)).transpose(1, 2), cos, sin)
        k = _rotated(self.k_norm(self.k_proj(x).float().view(split)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(split).transpose(1, 2)
        mixed = attend(q, k, v, unseen)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class TextMLP(nn.Module):
    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TextLayer(nn.Module):
    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.hidden, eps=sizes.epsilon)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, eps=sizes.epsilon)
        self.self_attn = TextAttention(sizes)
        self.mlp = TextMLP(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, unseen: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, unseen)
        return x + self.mlp(self.post_attention_layernorm(x))


class Text(nn.Module):
    """The language model, without its head."""

    def __init__(self, sizes: Architecture, vocabulary: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(TextLayer(sizes) for _ in range(sizes.text_layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=sizes.epsilon)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [batch, 1, length, head_dim / 2], of [3, batch, length] positions: interleaved M-RoPE."""
        width = self.sizes.head_dim
        frequencies = self.sizes.rope_theta ** -(torch.arange(0, width, 2).float() / width)
        axis = torch.zeros(width // 2, dtype=torch.long)
        for number in (1, 2):
            axis[number : self.sizes.mrope_section[number] * 3 : 3] = number
        angles = positions.permute(1, 2, 0).float()[:, :, axis] * frequencies
        return angles.cos()[:, None], angles.sin()[:, None]

    def forward(
        self, ids: Tensor, positions: Tensor, at: Tensor, features: Tensor, deep: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Hidden states before the head, [batch, length, hidden].

        Args:
            ids: [batch, length] tokens; padded on the right, where nothing is read.
            positions: [3, batch, length].
            at: [picture tokens] flat places of picture tokens in `ids`.
            features, deep: [picture tokens, hidden], in the order of `at`.
            mask: [batch, 1, length, length], true where a token may look; None: at all before it.
        """
        x = self.embed_tokens(ids)
        x = x.flatten(0, 1).index_copy(0, at, features).view(x.shape)
        cos, sin = self.angles(positions)
        seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril() if mask is None else mask
        unseen = torch.zeros(seen.shape).masked_fill(~seen, _NEVER)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, unseen)
            if index == 0:
                x = x.flatten(0, 1).index_add(0, at, deep).view(x.shape)
        return self.norm(x)


class _Model(nn.Module):
    def __init__(self, sizes: Architecture, vocabulary: int) -> None:
        super().__init__()
        self.visual = Vision(sizes)
        self.language_model = Text(sizes, vocabulary)


class Network(nn.Module):
    """The whole model; `state_dict` has the checkpoint's names and shapes."""

    def __init__(self, sizes: Architecture, vocabulary: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = _Model(sizes, vocabulary)
        self.lm_head = nn.Linear(sizes.hidden, vocabulary, bias=False)
        self._draw_start_values(sizes)

    @torch.no_grad()
    def _draw_start_values(self, sizes: Architecture) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.05)
            elif name.endswith("bias"):
                parameter.zero_()
        visual = self.model.visual
        waves = dct_waves(PATCH, 5)
        start = visual.patch_embed.proj.weight.mul_(0.2)
        for number in range(min(sizes.hidden, 3 * len(waves))):
            plane, wave = number % 3, waves[number // 3]
            start[number] = 0.0
            start[number, plane] = wave / 8  # half of it for each of the two frames
        visual.pos_embed.weight.copy_(0.6 * fourier_positions(sizes.positions_per_side, sizes.hidden))


def dct_waves(side: int, lowest: int) -> Tensor:
    """[lowest * lowest, side, side]: the orthonormal 2-D cosine waves of the lowest frequencies."""
    at = (torch.arange(side) + 0.5) / side
    rows = torch.stack([torch.cos(math.pi * k * at) * math.sqrt((1 if k == 0 else 2) / side) for k in range(lowest)])
    return (rows[:, None, :, None] * rows[None, :, None, :]).reshape(-1, side, side)


def fourier_positions(side: int, width: int) -> Tensor:
    """[side * side, width]: smooth position embeddings, waves of rising frequency along each axis."""
    at = torch.linspace(0, 1, side)
    frequencies = torch.logspace(math.log10(0.25), math.log10(4.0), width // 4)
    turns = 2 * math.pi * at[:, None] * frequencies
    waves = torch.cat((turns.sin(), turns.cos()), dim=1)  # [side, width / 2]
    rows, columns = waves[:, None].expand(side, side, -1), waves[None].expand(side, side, -1)
    return torch.cat((rows, columns), dim=-1).reshape(side * side, width)


def checkpoint_tensors(network: Network, dtype: Any) -> dict[str, Tensor]:
    """What `model.safetensors` holds."""
    return {name: tensor.detach().to(dtype).contiguous().clone() for name, tensor in network.state_dict().items()}
