"""Features without a model: what measurements hand to an encoder's producer in place of a vision tower's."""

from __future__ import annotations

import torch


def random_feature(tokens: int, hidden: int, seed: int = 0) -> torch.Tensor:
    """[tokens, hidden] in fp16, the same for the same seed. Rows repeat: a large one shall not take long."""
    rows = torch.randn((min(tokens, 64), hidden), generator=torch.Generator().manual_seed(seed)).to(torch.float16)
    return rows.repeat(-(-tokens // len(rows)), 1)[:tokens].contiguous()
