"""An encoder's part of an image: the cut of what vLLM's own processor made of it (IRP by tile, EPD §3.3.2).

The proxy names a part (`store.keys.part_keys`), and sends the whole image with that name: vLLM's processor sees the
whole image on every encoder, as it has to, since resized crops are not crops of what was resized. Then the item is made
smaller before vLLM's scheduler looks at it: the tower, budgets, encoder cache and reports have to do with its tiles
alone. Only items whose tower takes each tile by itself, and whose rows are those of its tiles one after the other, can
be cut: InternVL's. (LLaVA's rows run across tiles, without padding and with the ends of lines.)
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from store.keys import part_of

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec

_TILES = "image_num_patches"
_PIXELS = ("pixel_values", "pixel_values_flat")
"""vLLM's names of fields: how many tiles an item has, and these, [tiles, channels, side, side]."""


def with_part_alone(feature: MultiModalFeatureSpec) -> MultiModalFeatureSpec:
    """An item of a request as it is to be encoded: one that is named as a part has the tiles of that part alone.

    Where it cannot be cut (another kind of item, fewer tiles than parts) it stays whole and gets the name of the whole:
    its feature is then found as that of any image.
    """
    part = part_of(feature.identifier)
    if part is None:
        return feature
    whole, item = replace(feature, identifier=part.whole), feature.data
    pixels = next((name for name in _PIXELS if item is not None and name in item), "")
    if item is None or not pixels or _TILES not in item:
        return whole
    tiles, position = int(item[_TILES].data), feature.mm_position
    share, (rows, rest) = part.of(tiles), divmod(position.get_num_embeds(), tiles)
    if rest or len(item[pixels].data) != tiles or not share:
        return whole
    # Where the rows lie in the prompt is of no interest here: the first so many places are as good as any.
    embeds = rows * len(share)
    mask = position.is_embed
    length = embeds if mask is None else int(mask.nonzero()[embeds - 1]) + 1
    data = copy.copy(item)
    data[pixels] = replace(item[pixels], data=item[pixels].data[share.start : share.stop])
    data[_TILES] = replace(item[_TILES], data=item[_TILES].data.new_tensor(len(share)))
    placed = replace(position, length=length, is_embed=None if mask is None else mask[:length])
    return replace(feature, data=data, mm_position=placed)
