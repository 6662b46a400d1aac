"""Budgets of a step: how many prompt tokens and how many tokens of media items fit into it without breaking an SLO.

Stage-level batching as in HydraInfer (§4.2, Algorithm 1), for engines that run the encoder and the language model one
after the other. A step may take TBT where requests decode in it, else half of the TTFT, because encode and prefill are
two steps of a request. Decodes always run; what of the time is left belongs to prompts that can be computed at once,
then to items. An item is never cut: where nothing else is to be computed, or items have been passed over a few times,
one that is larger than the budget gets its step.

How long a step takes is learnt from the steps themselves: nothing is held back before the first ones have been
measured, and whatever changes (other images, a neighbour on the device) is followed. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SHARE, SMALLEST_SHARE = 0.9, 0.3
"""Of the SLO that a step is planned to take: half of all steps take longer than they were expected to, and where a
neighbour computes now and then, some twice as long."""
SHRINKS, GROWS = 0.95, 1.0017
"""What the share becomes after a step that broke TBT, and after one that kept it: in balance at one in thirty that do.
Of a request's own gaps one in ten may be too long, and the images that cannot be cut take their part of those."""
FILLED = 0.5
"""Of what may be planned that a step has to be expected to take, else that it kept TBT says nothing."""
LEAST_SHARE = 1 / 8
"""Of the SLO that prompts and items have in a step, however many requests decode: they must go on."""
LOST_SHARE = 1 / 2
"""The same where decodes alone take longer than the SLO: it is lost, and nobody is helped by slow prefills."""
LEAST_TOKENS = 16
"""Of a prompt, in a step that computes some: fewer are not worth a step."""
MOST_PASSED = 4
"""Steps in a row in which prompts may leave no room for items that wait."""
MEMORY = 64
"""Steps of a kind after which one counts 1/e."""
OUTLIER, TRUSTED = 3.0, 8
"""A step counts as so many times what was expected at most, once so many have been measured: a machine may stall."""
RECENT = 0.2
"""Weight of the last step in `Budgets.decode_step_s`."""
STRESSED = 0.9
"""Of TBT that the step of a neighbour may take before an encoder makes room for it."""
LEAST_NEIGHBOURLY = 1 / 16


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n of 0 … `most` that fits, by bisection; what fits must not begin to fit again. 0 always does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


class Line:
    """Seconds for an amount, as a straight line through decayed measurements. Neither rises nor falls below 0.

    Args:
        proportional: the least share of a mean measurement that is the amount's, not the setup's. It bounds by how much
            a budget can grow beyond what was measured; 0 where amounts beyond it are not asked for.
    """

    def __init__(self, proportional: float) -> None:
        self._proportional = proportional
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.count = 0
        self.setup_s = self.per_unit_s = 0.0

    def seconds(self, amount: float) -> float:
        """0 before anything was measured."""
        return self.setup_s + self.per_unit_s * amount if amount > 0 else 0.0

    def add(self, amount: float, seconds: float) -> None:
        seconds, expected = max(seconds, 0.0), self.seconds(amount)
        if self.count >= TRUSTED and expected > 0:
            seconds = min(seconds, OUTLIER * expected)
        elif 0 < self.count < TRUSTED and OUTLIER * seconds < expected:
            self._weight = self._x = self._y = self._xx = self._xy = 0.0  # the first ones compiled what they ran
            self.count = 0
        self.count += 1
        kept = 1 - 1 / MEMORY
        self._weight = self._weight * kept + 1
        self._x, self._y = self._x * kept + amount, self._y * kept + seconds
        self._xx, self._xy = self._xx * kept + amount * amount, self._xy * kept + amount * seconds
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        steepest = mean_y / mean_x
        if variance > 0.01 * mean_x * mean_x:  # amounts that differ by a tenth and more
            slope = (self._xy / self._weight - mean_x * mean_y) / variance
        else:
            slope = steepest if self._proportional else 0.0
        self.per_unit_s = min(max(slope, self._proportional * steepest), steepest)
        self.setup_s = max(0.0, mean_y - self.per_unit_s * mean_x)


def _most_within(room_s: float, most: int, *lines: Line) -> int:
    """The largest amount of which all of these together take no longer."""
    setup_s, per_unit_s = sum(line.setup_s for line in lines), sum(line.per_unit_s for line in lines)
    return largest(lambda n: setup_s + per_unit_s * n <= room_s, most)


@dataclass(frozen=True)
class Limits:
    """Of one step.

    Attributes:
        tokens: of prompts, beside the decodes.
        items: tokens of media items that are encoded.
        oversize: one item may be larger than that.
    """

    tokens: int
    items: int
    oversize: bool = True


class Budgets:
    """Of one engine; belongs to its scheduler's thread.

    Args:
        ttft_s, tbt_s: the SLO.
        most_tokens, most_items: what the engine is configured for; never exceeded.
        prefills: whether there is a language model; an encoder's prompts take no time.

    Attributes:
        last: limits of the last step that was planned.
        held: steps that were to leave an item, or a part of a prompt, for the next ones.
        decode_step_s: seconds of a recent step with decodes; 0 before the first.
    """

    def __init__(
        self, ttft_s: float, tbt_s: float, *, most_tokens: int, most_items: int, prefills: bool = True
    ) -> None:
        self._ttft_s, self._tbt_s = ttft_s, tbt_s
        self._most = Limits(most_tokens, most_items)
        self._prefills = prefills
        self._decode, self._prompt, self._item = Line(0.0), Line(0.5), Line(0.5)
        self._passed, self._share = 0, SHARE
        self._neighbourly = 1.0
        self.last = self._most
        self.held = 0
        self.decode_step_s = 0.0

    # --- what steps take --------------------------------------------------------------------------------------------

    def measured(self, seconds: float, *, decodes: int, prompt_tokens: int, item_tokens: int) -> None:
        """A step took so long that did this: a token each for so many requests, so much of prompts and of items. Each
        kind of work is learnt from what a step took beyond the kinds that are known from other steps."""
        if decodes:
            self.decode_step_s += (seconds - self.decode_step_s) * (RECENT if self.decode_step_s else 1.0)
        if decodes and prompt_tokens and not item_tokens:  # an item cannot be cut: nothing follows from its step
            if seconds > self._tbt_s:
                self._share = max(SMALLEST_SHARE, self._share * SHRINKS)
            elif self.seconds(decodes=decodes, tokens=prompt_tokens) > FILLED * self._share * self._tbt_s:
                self._share = min(SHARE, self._share * GROWS)
        if not self._prefills:
            prompt_tokens = 0
        if prompt_tokens < LEAST_TOKENS and not item_tokens:  # the last of a prompt whose KV came: a token like others
            decodes, prompt_tokens = decodes + (prompt_tokens > 0), 0
        rest_s = seconds - self._decode.seconds(decodes)
        if decodes and rest_s <= 0:  # then decodes were thought too slow, and nothing follows for what was beside them
            self._decode.add(decodes, seconds)
            return
        if item_tokens and prompt_tokens and not self._prompt.count:
            self._prompt.add(prompt_tokens, rest_s / 2)  # a guess; steps with prompts alone, which follow, correct it
        if item_tokens:
            # At least a part is the item's: were prompts thought too slow, no step would ever say so.
            self._item.add(item_tokens, max(rest_s - self._prompt.seconds(prompt_tokens), rest_s / 4))
        elif prompt_tokens:
            self._prompt.add(prompt_tokens, rest_s)
        elif decodes:
            self._decode.add(decodes, seconds)

    def seconds(self, *, decodes: int = 0, tokens: int = 0, items: int = 0) -> float:
        """What a step is expected to take: the decodes, then the prompts, then the encoder."""
        prompt_s = self._prompt.seconds(tokens) if self._prefills else 0.0
        return self._decode.seconds(decodes) + prompt_s + self._item.seconds(items)

    # --- what a step may do -----------------------------------------------------------------------------------------

    def limits(self, decodes: int, ready_tokens: int, next_item: int) -> Limits:
        """Of the next step.

        Args:
            decodes: requests that get a token in it.
            ready_tokens: of prompts that have begun and whose items, up to there, are encoded.
            next_item: tokens of the first item that is to be encoded; 0 where none is known of.
        """
        limit_s = self._tbt_s if decodes else self._ttft_s / 2
        decodes_s = self.seconds(decodes=decodes)
        if decodes_s < SHARE * limit_s:
            left_s = (self._share if decodes else SHARE) * limit_s - decodes_s
            room_s = max(left_s, LEAST_SHARE * limit_s)
        else:
            room_s = LOST_SHARE * limit_s
        items, oversize, prompts_s = self._items(room_s), True, 0.0
        if ready_tokens and next_item and self._passed < MOST_PASSED:
            prompts_s = self.seconds(tokens=min(ready_tokens, self._tokens(room_s)))
            items = self._items(room_s - prompts_s)
            oversize = False
            self.held += next_item > items
        encoded = (next_item if oversize else 0) if next_item > items else min(next_item, items)
        self._passed = self._passed + 1 if next_item and not encoded else 0
        tokens = self._tokens(room_s - self._item.seconds(encoded))
        self.last = Limits(tokens, items, oversize)
        return self.last

    def _tokens(self, room_s: float) -> int:
        if not self._prefills:
            return self._most.tokens
        return min(max(_most_within(room_s, self._most.tokens, self._prompt), LEAST_TOKENS), self._most.tokens)

    def _items(self, room_s: float) -> int:
        """An item's tokens are a prompt's, too, and are to be computed in the same step."""
        lines = (self._item, self._prompt) if self._prefills else (self._item,)
        return int(self._neighbourly * _most_within(room_s, self._most.items, *lines))

    # --- a neighbour on the device ----------------------------------------------------------------------------------

    def neighbour(self, decode_step_s: float) -> None:
        """A stage on the same device takes so long for a step with decodes; 0 where nothing decodes there. An encoder
        makes room for it (EPD-Serve §3.5): half the items where that is too long, else a tenth more."""
        if decode_step_s > STRESSED * self._tbt_s:
            self._neighbourly = max(LEAST_NEIGHBOURLY, self._neighbourly / 2)
        else:
            self._neighbourly = min(1.0, self._neighbourly * 1.1)

    # --- what is told of it -----------------------------------------------------------------------------------------

    def report(self, *, decoding: bool) -> dict[str, Any]:
        """Fields of `wire.StageReport`. `decoding`: requests run, so that the last step with decodes still says
        something."""
        return {
            "decode_step_s": self.decode_step_s if decoding else 0.0,
            "token_budget": self.last.tokens,
            "item_budget": self.last.items,
            "held_steps": self.held,
        }
