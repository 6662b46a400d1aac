"""The requests every layout is asked, as bodies of /v1/chat/completions. Greedy unless said otherwise."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import httpx
from PIL import Image

from tests.e2e.demo_prompts import OTHER_QUESTIONS, PAIRWISE_DIFFERENT, TEXT_ONLY, WHAT, DemoPrompt
from tests.e2e.serving import MODEL, Endpoint

Body = dict[str, Any]


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def image_part(data: bytes, mime: str = "image/png") -> Body:
    return {"type": "image_url", "image_url": {"url": f"data:{mime};base64,{base64.b64encode(data).decode()}"}}


def chat(text: str, *pictures: bytes, **more: Any) -> Body:
    """One user turn. `return_token_ids` is vLLM's: answers are compared token for token."""
    content = [*map(image_part, pictures), {"type": "text", "text": text}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 24, "temperature": 0}
    return {**body, "return_token_ids": True, **more}


def conversation(turns: int, *pictures: bytes) -> Body:
    """A long prompt made of what the demo model was trained on: small talk, then a question about the last picture.

    Text that it has never seen gives near-ties, which rounding decides differently from batch to batch. After more
    than four turns the demo model answers as it did before, whatever the picture: those are for KV, shorter ones for
    features.
    """
    said = "Hello! Send me a picture of coloured shapes."
    small_talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": said}] * turns
    body = chat(WHAT, *pictures)
    return {**body, "messages": [*small_talk, *body["messages"]]}


def about(prompt: DemoPrompt, **more: Any) -> Body:
    return chat(prompt.question, png(prompt.picture()), **more)


def fresh_prompt(number: int) -> DemoPrompt:
    """An image of its own for each number, of a width that none of `demo_prompts` has: its feature can be nowhere yet.

    Launches are shared, so no number belongs to two modules: 0–299 are those of `test_features`, 300–399 of
    `test_preemption`, 400–419 of `test_faults`, 420–429 of `test_template`, 430 of `test_switchable`, 500–519 of
    `test_core_shares`, 600–699 of `test_ray`, 700 of `test_vllm_features`, 800–819 of `test_examples`, 900–909 of
    `test_partial_prefill`, 910–919 of `test_counted_media`, 920–939 of `test_encoder_free`, 940–969 of
    `test_card_to_card`.
    """
    base = PAIRWISE_DIFFERENT[number % len(PAIRWISE_DIFFERENT)]
    return DemoPrompt(base.shapes, 225 + number, base.answer, background=base.background)


def fresh(number: int) -> Body:
    """A question about `fresh_prompt(number)`."""
    return about(fresh_prompt(number))


FIRST = png(PAIRWISE_DIFFERENT[0].picture())
SIZES = [png(PAIRWISE_DIFFERENT[index].picture()) for index in (2, 10, 0)]  # 128, 160 and 224 pixels wide
TWICE = png(PAIRWISE_DIFFERENT[4].picture())

# Each one solo, compared with plain vLLM's answer. All were checked to have top-1 margins above 1 (logits): bfloat16
# rounding differs with the shape of a batch, and would decide nearer ties one way here and another way there.
SOLO: dict[str, Body] = {
    "text": chat(TEXT_ONLY[0][0]),
    "another text": chat(TEXT_ONLY[1][0]),
    "one picture": about(PAIRWISE_DIFFERENT[4]),
    "another question": about(OTHER_QUESTIONS[3]),
    "three pictures of different sizes": chat(WHAT, *SIZES),
    "the same picture twice": chat(WHAT, TWICE, TWICE),
    "a long prompt": conversation(50, FIRST),
}
# Sampling with n = 2 cannot be greedy in vLLM; this temperature makes it so in effect.
TWO_CHOICES = about(PAIRWISE_DIFFERENT[8], n=2, temperature=0.01, seed=7)


def tokens(response: httpx.Response) -> list[list[int]]:
    """Token ids of every choice."""
    assert response.status_code == 200, response.text[:500]
    choices = response.json()["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text[:500]
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


def ask(endpoint: Endpoint, body: Body) -> list[list[int]]:
    return tokens(endpoint.post("/v1/chat/completions", body))


def stream(endpoint: Endpoint, body: Body) -> tuple[list[int], list[Body]]:
    """(token ids of the only choice, all chunks) of a streamed answer that ends with [DONE]."""
    ids: list[int] = []
    chunks: list[Body] = []
    done = False
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with endpoint.client.stream("POST", endpoint.url + "/v1/chat/completions", json=streamed) as response:
        assert response.status_code == 200, response.read()[:500]
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            assert not done, "events after [DONE]"
            if line == "data: [DONE]":
                done = True
                continue
            chunk = json.loads(line.removeprefix("data: "))
            chunks.append(chunk)
            for choice in chunk["choices"]:
                ids += choice.get("token_ids") or []
    assert done, "the stream ended without [DONE]"
    return ids, chunks
