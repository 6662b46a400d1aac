"""The workloads by name: every number of theirs with its source.

A `Fact` is what a source prints, and a sample of the profile has to meet it (tests/bench/workloads/test_profiles.py).
What no source prints is in `chosen`, in words: nobody has to take a guess of ours for a measurement of somebody's.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from bench.workloads.distributions import (
    ImageSizes,
    LogNormal,
    Numbers,
    OneOf,
    OneSizeOf,
    PowerLaw,
    Sizes,
    Traffic,
    Zipf,
    exactly,
)
from epd_serve.errors import ConfigError

OUTPUT_TOKENS = 64
"""EPD-Serve §4.1: "the output sequence length is uniformly fixed to 64 tokens in all experiments"."""

ENDLESS = 1_000_000_000


@dataclass(frozen=True)
class Fact:
    """A number that a source prints.

    Attributes:
        statistic: as `bench/workloads/command.py: summarise` names it.
        within: relative tolerance of a sample of the profile's own size; of at-most and at-least facts it is 0.
        sense: `==` within the tolerance, or a bound.
    """

    statistic: str
    value: float
    source: str
    within: float = 0.02
    sense: str = "=="


@dataclass(frozen=True)
class Profile:
    """A workload before it is seeded.

    Attributes:
        source: whose workload it is modelled on.
        text_tokens: of a request with images. text_only_tokens: of one without.
        sizes: of the images.
        traffic: whiles that take turns; one of them alone is a steady workload. The mean of length / pace over a round
            equals the mean length, so that bursts leave the average rate as it was asked for.
        count: requests of a run where nothing else is said.
        chosen: what is not published and therefore our choice.
    """

    name: str
    source: str
    text_tokens: Numbers
    sizes: ImageSizes
    traffic: tuple[Traffic, ...]
    facts: tuple[Fact, ...]
    chosen: str = ""
    text_only_tokens: Numbers | None = None
    max_tokens: int = OUTPUT_TOKENS
    count: int = 512


def steady(images: Numbers, text_only: float = 0.0) -> tuple[Traffic, ...]:
    """The same all the time."""
    return (Traffic(ENDLESS, text_only, images),)


_EPD_SERVE = "EPD-Serve §4.1"
_HYDRA = "HydraInfer v1 §5.1, v2 §5.1"
_HYDRA_OUTPUT = "Output: HydraInfer fixes it to what each model answered and prints it in figures only (v1 9, v2 8)"

_OURS = "ours, fixed before anything was measured with it: `epd-bench plan`"

_ALL = (
    Profile(
        "visualwebinstruct-like",
        _EPD_SERVE,
        text_tokens=LogNormal(63.1, 0.7, 4, 512),
        sizes=OneSizeOf(((1280, 720),)),
        traffic=steady(exactly(1), text_only=0.5),
        facts=(
            Fact("requests", 512, f'{_EPD_SERVE}: "A subset of 512 samples"', 0),
            Fact("text_only_share", 0.5, f'{_EPD_SERVE}: "256 text-image requests and 256 text-only requests"', 0),
            Fact("text_tokens_mean", 63.1, f'{_EPD_SERVE}: "text inputs contain 63.1 tokens on average"'),
            Fact("width_mean", 1280, f'{_EPD_SERVE}: "standardized to a resolution of 1280×720"', 0),
            Fact("height_mean", 720, f'{_EPD_SERVE}: "standardized to a resolution of 1280×720"', 0),
            Fact("output_tokens_mean", 64, f'{_EPD_SERVE}: "uniformly fixed to 64 tokens"', 0),
        ),
        chosen="one image per text-image request; spread of text lengths (log-normal, sigma 0.7)",
    ),
    Profile(
        "sharegpt4o-like",
        _EPD_SERVE,
        text_tokens=LogNormal(9.6, 0.4, 2, 64),
        sizes=Sizes(LogNormal(802, 0.45, 64, 4096), LogNormal(652, 0.45, 64, 4096)),
        traffic=steady(exactly(1)),
        facts=(
            Fact("requests", 512, f'{_EPD_SERVE}: "A subset of 512 requests"', 0),
            Fact("width_mean", 802, f'{_EPD_SERVE}: "average image resolution of 802×652"'),
            Fact("height_mean", 652, f'{_EPD_SERVE}: "average image resolution of 802×652"'),
            Fact("text_tokens_mean", 9.6, f'{_EPD_SERVE}: "average text length of 9.6 tokens"'),
            Fact("output_tokens_mean", 64, f'{_EPD_SERVE}: "uniformly fixed to 64 tokens"', 0),
            Fact("width_p95", 1000, 'ModServe §3.2 on ShareGPT-4o: "P95 exceeding 1000 pixels"', 0, ">="),
            Fact("height_p95", 1000, 'ModServe §3.2 on ShareGPT-4o: "P95 exceeding 1000 pixels"', 0, ">="),
        ),
        chosen="spread of sizes (log-normal, sigma 0.45: the P95 is twice the median, as ModServe's 500 and 1000) and "
        "of text lengths; ModServe's median of the whole dataset, 500, is below what a mean of 802×652 allows here",
    ),
    Profile(
        "multi-image-4k",
        "EPD (Efficiently Serving Large Multimodal Models) §5",
        text_tokens=exactly(22),
        sizes=OneSizeOf(((4032, 3024),)),
        traffic=steady(OneOf((2, 4, 6, 8))),
        count=100,
        facts=(
            Fact("requests", 100, 'EPD §5, online: "executed until 100 requests were completed"', 0),
            Fact("text_tokens_mean", 22, 'EPD §5, datasets: "(excluding multimodal tokens) was fixed to 22"', 0),
            Fact("width_mean", 4032, 'EPD §5.1: "4K resolution of 4032x3024 pixels"', 0),
            Fact("height_mean", 3024, 'EPD §5.1: "4K resolution of 4032x3024 pixels"', 0),
            Fact("images_max", 8, 'EPD Fig. 4: "2, 4, 6, and 8 images per request"', 0),
            Fact("images_min", 2, 'EPD Fig. 4: "2, 4, 6, and 8 images per request"', 0),
        ),
        chosen="the four counts mixed evenly (EPD runs each alone: --pictures-each N); EPD's answers have 10 tokens "
        "(--output-tokens 10)",
    ),
    Profile(
        "textcaps-like",
        f"{_HYDRA}: TextCaps",
        text_tokens=exactly(9),
        sizes=OneSizeOf(((1024, 768), (1024, 683), (768, 1024), (683, 1024), (1024, 1024))),
        traffic=steady(exactly(1)),
        facts=(Fact("images_max", 1, "HydraInfer v1 §5.1: image description tasks, each on one image", 0),),
        chosen="one fixed instruction's length; sizes: Open Images at 1024 pixels on the long side, usual aspect "
        f"ratios. {_HYDRA_OUTPUT}",
    ),
    Profile(
        "textvqa-like",
        f"{_HYDRA}: TextVQA",
        text_tokens=LogNormal(8.12, 0.3, 4, 32),
        sizes=OneSizeOf(((1024, 768), (1024, 683), (768, 1024), (683, 1024), (1024, 1024))),
        traffic=steady(exactly(1)),
        facts=(
            Fact("text_tokens_mean", 8.12, "VisualMRC (arXiv 2101.11272), Table 1: questions of TextVQA, 8.12 tokens"),
            Fact("images_max", 1, "HydraInfer v1 §5.1: visual question answering, each on one image", 0),
        ),
        chosen="spread of question lengths; sizes as of textcaps-like, whose images they are. " + _HYDRA_OUTPUT,
    ),
    Profile(
        "textvqa-1080p",
        "vllm-ascend's weekly acceptance of EPD (Qwen2.5-VL-7B-Instruct, dataset textvqa-perf-1080p)",
        text_tokens=LogNormal(8.12, 0.3, 4, 32),
        sizes=OneSizeOf(((1920, 1080),)),
        traffic=steady(exactly(1)),
        max_tokens=256,
        facts=(
            Fact("requests", 512, 'vllm-ascend, EPD acceptance: "num_prompts": 512', 0),
            Fact("output_tokens_mean", 256, 'vllm-ascend, EPD acceptance: "max_out_len": 256', 0),
            Fact("height_mean", 1080, 'vllm-ascend, EPD acceptance: "textvqa-perf-1080p"', 0),
        ),
        chosen="every answer has the most tokens that it may have; lengths of questions as of textvqa-like",
    ),
    Profile(
        "five-images-9k",
        "Dynamo #13466: one GB200, Qwen3.5-122B, E and PD on one device",
        text_tokens=exactly(4600),
        sizes=OneSizeOf(((1280, 720),)),
        traffic=steady(exactly(5)),
        count=24,
        facts=(Fact("images_max", 5, "Dynamo #13466: five images in a prompt of 9,000 tokens", 0),),
        chosen="sizes of the images: 880 tokens each where 32x32 pixels are one, the rest of the 9,000 is text",
    ),
    Profile(
        "pope-like",
        f"{_HYDRA}: POPE",
        text_tokens=LogNormal(9, 0.1, 8, 12),
        sizes=OneSizeOf(((640, 480), (640, 427), (480, 640), (427, 640), (640, 640))),
        traffic=steady(exactly(1)),
        max_tokens=2,
        facts=(
            Fact("width_max", 640, "EvalScope's statistics of POPE: resolutions 500x243 to 640x640", 0, "<="),
            Fact("height_max", 640, "EvalScope's statistics of POPE: resolutions 500x243 to 640x640", 0, "<="),
            Fact("images_max", 1, 'EvalScope on POPE: "Images per Sample min: 1, max: 1"', 0),
        ),
        chosen='question "Is there a … in the image?" as 8 to 12 tokens; COCO\'s usual sizes; output: yes or no and an '
        "end of text",
    ),
    Profile(
        "mme-like",
        f"{_HYDRA}: MME",
        text_tokens=LogNormal(18, 0.35, 8, 64),
        sizes=Sizes(LogNormal(640, 0.5, 100, 2048), LogNormal(520, 0.5, 100, 2048)),
        traffic=steady(exactly(1)),
        max_tokens=2,
        facts=(
            Fact("output_tokens_mean", 2, 'HydraInfer v1 §5.2: MME has "minimal decode workload": yes or no', 0),
            Fact("images_max", 1, "HydraInfer v1 §5.1: perception and cognition tasks on one image", 0),
        ),
        chosen='sizes (a mix of sources); question and "Please answer yes or no." as 18 tokens on average',
    ),
    Profile(
        "vizwiz-like",
        f"{_HYDRA}: VizWiz",
        text_tokens=LogNormal(8, 0.5, 2, 64),
        sizes=OneSizeOf(((960, 1280), (1224, 1632), (1936, 2592), (720, 960), (2448, 3264))),
        traffic=steady(exactly(1)),
        facts=(Fact("images_max", 1, "HydraInfer v1 §5.1: an image taken by a blind user and a question", 0),),
        chosen="sizes of upright phone photographs: HydraInfer gives VizWiz 8 s to the first token where the others "
        "have 0.25 s (v1 Table 3, LLaVA-1.5, which has 576 tokens for any image: it is the pixels); question "
        f"lengths. {_HYDRA_OUTPUT}",
    ),
    Profile(
        "azure-bursty",
        "ModServe §3.2, §5.1: Azure's production traces",
        text_tokens=LogNormal(42, 0.5, 8, 512),
        text_only_tokens=PowerLaw(2.9, 30, 2048),
        sizes=Sizes(LogNormal(500 * 1.117, 0.47, 64, 4096), LogNormal(500 * 1.117, 0.47, 64, 4096)),
        traffic=(
            Traffic(120, text_only=0.55, images=Zipf(2.0, 16), pace=0.8125),
            Traffic(40, text_only=0.15, images=Zipf(1.0, 16), pace=3.25),
        ),
        facts=(
            Fact("images_max", 16, 'ModServe §5.1: "number of images … (ranges from 0 to 16)"', 0),
            Fact("images_min", 0, 'ModServe §5.1: "number of images … (ranges from 0 to 16)"', 0),
            Fact("width_median", 500, 'ModServe §3.2: "median image width and height around 500 pixels"', 0.04),
            Fact("height_median", 500, 'ModServe §3.2: "median image width and height around 500 pixels"', 0.04),
            Fact("width_p95", 1000, 'ModServe §3.2: "P95 exceeding 1000 pixels"', 0, ">="),
            Fact("height_p95", 1000, 'ModServe §3.2: "P95 exceeding 1000 pixels"', 0, ">="),
        ),
        chosen="lengths and strength of bursts (a quarter of the requests, four times the rate, images k^-1 instead of "
        "k^-2: ModServe shows them in Fig. 10 without numbers); share without images; shortest prompt, 30 tokens. "
        "Prompts without images are a power law of 2.9 (ModServe §3.2, read as the exponent of the density). Its 4.4 "
        "is of whole prompts with images, whose length the images' tokens make and so the model served: it says "
        "nothing of their text, which is our choice, without a heavy tail (log-normal, mean 42, sigma 0.5)",
    ),
    Profile(
        "images-short-answers",
        _OURS,
        text_tokens=LogNormal(16, 0.4, 4, 64),
        sizes=OneSizeOf(((640, 480), (448, 448), (800, 600))),
        traffic=steady(exactly(2)),
        max_tokens=16,
        count=128,
        facts=(Fact("images_min", 2, _OURS, 0),),
        chosen="all of it: the encoder's share is as large as a workload's can be",
    ),
    Profile(
        "long-prompts",
        _OURS,
        text_tokens=LogNormal(64, 0.4, 8, 256),
        text_only_tokens=LogNormal(900, 0.4, 200, 1800),
        sizes=OneSizeOf(((448, 448),)),
        traffic=steady(exactly(1), text_only=0.9),
        count=128,
        facts=(Fact("text_only_share", 0.9, _OURS, 0.05),),
        chosen="all of it: prefills stand in the way of decodes",
    ),
    Profile(
        "long-answers",
        _OURS,
        text_tokens=LogNormal(32, 0.4, 8, 128),
        text_only_tokens=LogNormal(32, 0.4, 8, 128),
        sizes=OneSizeOf(((448, 448),)),
        traffic=steady(exactly(1), text_only=0.75),
        max_tokens=192,
        count=128,
        facts=(Fact("output_tokens_mean", 192, _OURS, 0),),
        chosen="all of it: nearly all work is decoding",
    ),
)

PROFILES: Mapping[str, Profile] = {profile.name: profile for profile in _ALL}


def profile(name: str) -> Profile:
    """The profile of that name.

    Raises:
        ConfigError: there is none; it names the nearest.
    """
    if name in PROFILES:
        return PROFILES[name]
    near = difflib.get_close_matches(name, PROFILES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(PROFILES)}"
    raise ConfigError(f"no workload is called {name!r}: {hint} (epd-bench workload --list shows all)", param="NAME")
