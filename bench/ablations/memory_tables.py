"""EPD's tables 2, 3 and 4 for any model: pictures of a request, batch, KV, each by where the encoder is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.ablations.known_models import MODELS, PICTURES, SLICE_PATCHES, Known
from bench.ablations.memory_rooms import PLACES, Room, Subject
from bench.ablations.parameters import weights_of
from deploy.placement_table import table
from epd_serve.model_sizes import model_sizes

BATCH_PICTURES = 10
"""Of a request, in EPD's table 3."""
KV_PICTURES = (5, 10, 20, 40, 80)
"""Of a request, in EPD's table 4."""


@dataclass(frozen=True)
class Case:
    """A model with a kind of picture, on one device. `paper`: which of its tables' rows are beside it, or None."""

    model: str
    picture: str
    rooms: Mapping[str, Room]
    paper: tuple[Known, int] | None = None

    @classmethod
    def of(
        cls,
        model: str,
        picture: str,
        subject: Subject,
        total: int,
        runtime: int,
        paper: tuple[Known, int] | None = None,
    ) -> Case:
        return cls(model, picture, {place: Room(subject, place, total, runtime) for place in PLACES}, paper)


def papers_cases(total: int, runtime: int) -> list[Case]:
    """The paper's models and pictures on a device of so many bytes."""
    found = []
    for known in MODELS:
        sizes = model_sizes(known.config)
        weights = weights_of(known.config, sizes) if sizes is not None else None
        assert sizes is not None and weights is not None, "written down with all sizes"
        for at, picture in enumerate(PICTURES):
            slices = known.slices[at]
            subject = Subject(
                sizes.towers["vision"],
                sizes.language,
                weights,
                slices * SLICE_PATCHES,
                slices * known.slice_tokens,
                known.context,
            )
            found.append(Case.of(known.name, picture, subject, total, runtime, (known, at)))
    return found


def figures(cases: Sequence[Case]) -> dict[str, float]:
    """`TABLE/MODEL/PICTURE/PLACE`; disaggregated is what encoder and prefill alone both allow. 0: it does not run."""
    found: dict[str, float] = {}
    for case in cases:
        pictures = {place: room.most_pictures() for place, room in case.rooms.items()}
        batches = {place: room.largest_batch(BATCH_PICTURES) for place, room in case.rooms.items()}
        where = f"{case.model}/{case.picture}"
        found[f"pictures_per_request/{where}/together"] = pictures["together"]
        found[f"pictures_per_request/{where}/disaggregated"] = min(pictures["encoder"], pictures["prefill"])
        found[f"pictures_per_request/{where}/disaggregated_spare"] = min(pictures["encoder"], pictures["spare"])
        found |= {f"max_batch/{where}/{place}": batch for place, batch in batches.items()}
        for count in KV_PICTURES:
            for place in ("together", "prefill", "spare"):
                room = case.rooms[place]
                share = room.kv_share(count)
                found[f"kv_share/{where}/{count} pictures/{place}"] = 0.0 if isinstance(share, str) else round(share, 4)
                found[f"kv_tokens/{where}/{count} pictures/{place}"] = room.kv_tokens(count)
    return found


def shown(cases: Sequence[Case]) -> str:
    """The three tables; the paper's numbers in brackets where it has them."""
    return "\n\n".join(
        [
            f"Most pictures of a request (batch 1, KV 80 % of what is free)\n{_pictures(cases)}",
            f"Largest batch (requests of {BATCH_PICTURES} pictures, KV 80 % of what is free)\n{_batches(cases)}",
            f"Largest KV cache of prefill, share of what is free beside the weights (batch 1)\n{_kv(cases)}",
        ]
    )


def _pictures(cases: Sequence[Case]) -> str:
    rows: list[tuple[str, ...]] = [
        ("model", "picture", "encoder beside prefill", "E and P apart", "ratio", "P with spare")
    ]
    for case in cases:
        counts = {place: room.most_pictures() for place, room in case.rooms.items()}
        together, apart = counts["together"], min(counts["encoder"], counts["prefill"])
        paper = case.paper and case.paper[0].paper_pictures[case.paper[1]]
        rows.append(
            (
                case.model,
                case.picture,
                _beside(together, paper and paper[0]),
                _beside(apart, paper and paper[1]),
                f"{apart / together:.1f}x" if together else "-",
                str(min(counts["encoder"], counts["spare"])),
            )
        )
    return table(rows)


def _batches(cases: Sequence[Case]) -> str:
    rows: list[tuple[str, ...]] = [("model", "picture", "encoder beside prefill", "E", "P", "P with spare")]
    for case in cases:
        counts = {place: room.largest_batch(BATCH_PICTURES) for place, room in case.rooms.items()}
        paper = case.paper and case.paper[0].paper_batch[case.paper[1]]
        own = [counts[place] for place in ("together", "encoder", "prefill")]
        told: Sequence[int | str | None] = [one or "OOM" for one in paper] if paper else [None] * len(own)
        cells = [_beside(one, other) for one, other in zip(own, told, strict=True)]
        rows.append((case.model, case.picture, *cells, str(counts["spare"])))
    return table(rows)


def _kv(cases: Sequence[Case]) -> str:
    rows: list[tuple[str, ...]] = [
        ("model", "picture", "pictures", "encoder beside prefill", "P alone", "P with spare", "tokens, beside", "alone")
    ]
    for case in cases:
        if case.paper is not None and PICTURES[case.paper[1]] != PICTURES[-1]:
            continue  # EPD's table 4 is of the largest pictures
        for count in KV_PICTURES:
            paper = case.paper and case.paper[0].paper_kv.get(count)
            shares = [case.rooms[place].kv_share(count) for place in ("together", "prefill", "spare")]
            texts = [one if isinstance(one, str) else f"{one:.0%}" for one in shares]
            if paper:
                texts = [f"{texts[0]} ({paper[0]})", f"{texts[1]} ({paper[1]})", texts[2]]
            tokens = [f"{case.rooms[place].kv_tokens(count):,}" for place in ("together", "prefill")]
            rows.append((case.model, case.picture, str(count), *texts, *tokens))
    return table(rows)


def _beside(own: int, paper: int | str | None) -> str:
    return str(own) if paper is None else f"{own} ({paper})"
