"""The phases of a request, and a span of one: the words of docs/measuring/phases.md, for whoever shows or counts them.

The eight of HydraInfer (v1 Fig. 13, v2 §5.4) and what surrounds them: client, proxy, HTTP, and what a stage's front end
does with a request before its engine has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """In the order of a request's path.

    P is whoever prefills and D whoever decodes what another has prefilled: of an instance that does both (`PD`, `EPD`)
    all is P's, and its prefill ends with the first token. Without an encoder of its own, prefill includes encode.

    Attributes:
        CLIENT: from when the request was due until its first byte was written.
        HTTP_CLIENT, HTTP_E, HTTP_P, HTTP_D: the hop to there until the whole request is there, and its answer's back.
        PROXY: parse, check and name the media, choose instances, make their requests. PROXY_QUEUE: waiting to be
            admitted to the stages.
        FAILED: attempts that were repeated.
        DOWNLOAD: of media from other hosts, by the proxy. DECODE_MEDIA: files to pixels or samples, in a stage.
        PREPROCESS_E, PREPROCESS_P, PREPROCESS_D: template, image processor, tokenizer, until it is the engine's.
        ENCODE_QUEUE, PREFILL_QUEUE: until the first step that computes some of it begins. P waits there for D's blocks
            and for features, too. DECODE_QUEUE: for blocks before the KV comes, and for a step after it.
        ENCODE, PREFILL: from the scheduler's decision to the end of the forward pass.
        EP: from the end of the encode until P has it verified and pinned, and P's copy into its model's memory.
        PD: while packets of its KV move, and from the end of the prefill until D has all of it.
        ANSWER_E, ANSWER_P, ANSWER_D: from the end of what gives the answer, or its first token, until its first bytes
            leave the stage.
        FIRST_TOKEN: D's first step. DECODE: from the first token to the last, at the client.
        STAGES: all of the above where the stages stamp nothing (simulated ones).
    """

    CLIENT = "client"
    HTTP_CLIENT = "HTTP client"
    PROXY = "proxy"
    PROXY_QUEUE = "proxy queue"
    FAILED = "failed attempts"
    DOWNLOAD = "download"
    DECODE_MEDIA = "media decode"
    HTTP_E = "HTTP E"
    PREPROCESS_E = "preprocess E"
    ENCODE_QUEUE = "encode queue"
    ENCODE = "encode"
    EP = "E→P"
    ANSWER_E = "answer E"
    HTTP_P = "HTTP P"
    PREPROCESS_P = "preprocess P"
    PREFILL_QUEUE = "prefill queue"
    PREFILL = "prefill"
    PD = "P→D"
    ANSWER_P = "answer P"
    HTTP_D = "HTTP D"
    PREPROCESS_D = "preprocess D"
    DECODE_QUEUE = "decode queue"
    FIRST_TOKEN = "first token"
    ANSWER_D = "answer D"
    STAGES = "stages, not told apart"
    DECODE = "decode"


@dataclass(frozen=True, order=True)
class Span:
    """Seconds (CLOCK_MONOTONIC) in which a request was in a phase. `instance`: where, "" for the client."""

    begin: float
    end: float
    phase: Phase
    instance: str = ""
