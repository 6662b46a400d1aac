"""What is asked of every layout, and how two answers are held against each other.

Greedy tokens have to be the monolith's. They can differ rightly in one case: the monolith itself was undecided. D runs
the last prompt token once more, alone, where a monolith computed it among all others, and several requests at a time
make batches of every shape; bfloat16 sums in another order, and a near tie falls the other way. What a near tie is on
this card is measured, not assumed: how far the monolith's own logprobs move when it is asked the same things alone and
together (`noise`). So the rule, one at a time as well as together: the first token that differs is one that the
monolith had held within `near_tie` of its own. A feature or KV of another request is no near tie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.bodies import SOLO, Body, about
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT
from tests.e2e.serving import Endpoint

TOP = 5
NOISES = 4.0  # a near tie is so many times what the monolith's logprobs were seen to move
LEAST_NEAR_TIE, MOST_NEAR_TIE = 0.05, 1.0
"""Bounds of it, in natural logarithms: bfloat16 has steps of 0.03 at logits of 4; a factor of 2.7 is no rounding."""

ONE_AT_A_TIME = {**SOLO, "another picture": about(PAIRWISE_DIFFERENT[9])}
TOGETHER = tuple(about(prompt) for prompt in PAIRWISE_DIFFERENT[:8])


@dataclass(frozen=True)
class Place:
    """One generated token, by its id. `candidates`: the likeliest ids there with their logprobs."""

    id: int
    logprob: float
    candidates: tuple[tuple[int, float], ...]


Answer = tuple[Place, ...]


def answer_of(plain: list[dict[str, Any]]) -> Answer:
    """From JSON."""
    return tuple(
        Place(at["id"], at["logprob"], tuple((token, logprob) for token, logprob in at["candidates"])) for at in plain
    )


def answered(endpoint: Endpoint, body: Body, headers: dict[str, str] | None = None) -> tuple[Answer, httpx.Response]:
    """The answer, token by token, and the response it came in."""
    asked = {**body, "logprobs": True, "top_logprobs": TOP, "return_tokens_as_token_ids": True}
    response = endpoint.post("/v1/chat/completions", asked, headers=headers)
    assert response.status_code == 200, response.text[:1000]
    (choice,) = response.json()["choices"]
    places = tuple(
        Place(_id(at["token"]), at["logprob"], tuple((_id(one["token"]), one["logprob"]) for one in at["top_logprobs"]))
        for at in choice["logprobs"]["content"]
    )
    return places, response


def _id(token: str) -> int:
    """vLLM's `token_id:17`: texts of different tokens can be equal."""
    return int(token.removeprefix("token_id:"))


def first_difference(ours: Answer, right: Answer) -> int | None:
    """Where the tokens differ first; None where they are equal, of equal length."""
    for place, (one, other) in enumerate(zip(ours, right, strict=False)):
        if one.id != other.id:
            return place
    return None if len(ours) == len(right) else min(len(ours), len(right))


def noise(alone: Answer, together: Answer) -> float:
    """How far the logprobs of the same tokens after the same tokens moved, at most."""
    place = first_difference(alone, together)
    pairs = zip(alone[:place], together[:place], strict=place is None)
    return max((abs(one.logprob - other.logprob) for one, other in pairs), default=0.0)


def near_tie_of(noises: list[float]) -> float:
    return min(MOST_NEAR_TIE, max(LEAST_NEAR_TIE, NOISES * max(noises)))


def margin(ours: Place, right: Place) -> float:
    """By how much the monolith preferred its own token to ours; infinite where ours was not among its candidates."""
    thought = dict(right.candidates)
    return right.logprob - thought[ours.id] if ours.id in thought else math.inf


def is_near_tie(ours: Answer, right: Answer, near_tie: float) -> bool:
    """Whether two answers that differ do so first where the monolith was undecided."""
    place = first_difference(ours, right)
    if place is None or place >= min(len(ours), len(right)):
        return place is None
    return margin(ours[place], right[place]) <= near_tie


def difference(ours: Answer, right: Answer) -> str:
    """How an answer differs from the monolith's, for whoever has to find out why; "" where it does not."""
    place = first_difference(ours, right)
    if place is None:
        return ""
    if place >= min(len(ours), len(right)):
        return f"{len(ours)} tokens instead of {len(right)}, equal up to there"
    here, there = ours[place], right[place]
    return (
        f"token {place} is {here.id} (logprob {here.logprob:.4f}), the monolith's {there.id} ({there.logprob:.4f}), "
        f"preferred by {margin(here, there):.4f}; its candidates: {_listed(there)}; this layout's: {_listed(here)}"
    )


def _listed(place: Place) -> str:
    return ", ".join(f"{token} {logprob:.3f}" for token, logprob in place.candidates)
