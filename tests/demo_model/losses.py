"""What is minimised: answers only, and an auxiliary loss that teaches the vision tower what each picture token shows.

Owns the throw-away linear heads. A picture token learns the name of the shape that covers it, that shape's rank in the
listing, and its own cell.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from epd_serve.demo.pictures import GRID
from tests.demo_model.batches import Batch, Pictures
from tests.demo_model.network import Network
from tests.demo_model.raster import NAMES

_CLASSES = (1 + len(NAMES), 4, GRID * GRID)


class Heads(nn.Module):
    """Linear readers of picture features, thrown away after training."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.read = nn.Linear(hidden, sum(_CLASSES))
        nn.init.zeros_(self.read.weight)  # nothing reaches the vision tower before there is something to read

    def forward(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, share of tokens read right per label) of [pictures, tokens, hidden] features."""
        read = self.read(features).float().flatten(0, 1).split(_CLASSES, dim=-1)
        truth = labels.flatten(0, 1).unbind(-1)
        loss = torch.stack([F.cross_entropy(it, right) for it, right in zip(read, truth, strict=True)]).sum()
        with torch.no_grad():
            right = torch.stack([(a.argmax(-1) == b).float().mean() for a, b in zip(read, truth, strict=True)])
        return loss, right


@dataclass(frozen=True)
class BatchLoss:
    """Result of one batch.

    Attributes:
        answers: summed loss of the answers' tokens, each by its weight.
        auxiliary: mean loss of the heads.
        right: per answer whether every token of it was the most likely one.
        margins: per token of the answers, by how much the best logit is above the second best.
    """

    answers: Tensor
    auxiliary: Tensor
    right: Tensor
    margins: Tensor


def pictures_loss(network: Network, heads: Heads, pictures: Pictures) -> tuple[Tensor, Tensor]:
    features, _ = network.model.visual(pictures.patches, pictures.grid)
    return heads(features, pictures.labels)


def dialogue_loss(network: Network, heads: Heads, batch: Batch) -> BatchLoss:
    """Run a batch.

    Greedy decoding says an answer exactly if, given the answer so far, each token of it is the most likely one: so no
    text has to be generated to know how many answers are right.
    """
    encoded = [network.model.visual(it.patches, it.grid) for it in batch.pictures]
    empty = torch.zeros(0, network.lm_head.in_features)
    features = torch.cat([it[0].flatten(0, 1) for it in encoded] or [empty])
    deep = torch.cat([it[1].flatten(0, 1) for it in encoded] or [empty])
    hidden = network.model.language_model(batch.ids, batch.positions, batch.at, features, deep, batch.mask)
    logits = network.lm_head(hidden.flatten(0, 1)[batch.predicting]).float()
    auxiliary = [heads(it[0], pictures.labels)[0] for it, pictures in zip(encoded, batch.pictures, strict=True)]
    with torch.no_grad():
        wrong = torch.zeros(int(batch.answer_of.max()) + 1)
        best = logits.topk(2).values
        wrong.index_add_(0, batch.answer_of, (logits.argmax(-1) != batch.answers).float())
    loss = torch.stack(auxiliary).mean() if auxiliary else torch.zeros(())
    spoken = (F.cross_entropy(logits, batch.answers, reduction="none") * batch.weights).sum()
    return BatchLoss(spoken, loss, wrong == 0, best[:, 0] - best[:, 1])
