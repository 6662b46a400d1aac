"""Which stages a request passes: modality x roles of the layout -> ordered paths. Pure.

multimodal: EPD | E->PD | EP->D | E->P->D.   text: EPD | PD | EP->D | P->D.   fused, without EPD and PD: EP | E->P.
Several kinds may stand side by side (`E-P-D` beside `EPD`): then a request can go either way, and whether its items are
encoded apart is decided with the way, never with the layout (`proxy/routing/plan.py`). An instance that prefills
holds the vision tower too, so the encode step may be skipped when every E is down. It can decode as well: what needs
one instance for both, and has none that is there for both, it answers alone.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass

from epd_serve.roles import Role


@dataclass(frozen=True)
class Path:
    """One way through the layout.

    Attributes:
        encode: an E instance encodes the items first.
        prefill: role that prefills for another instance, or None where the decoder prefills itself.
        decode: role that answers the client.
    """

    encode: bool
    prefill: Role | None
    decode: Role

    @functools.cached_property
    def name(self) -> str:
        stages = ("E" if self.encode else None, self.prefill, self.decode)
        return "-".join(stage for stage in stages if stage)

    @property
    def head(self) -> Role:
        """Role of the instance that takes the prompt first."""
        return self.prefill or self.decode

    @property
    def tail(self) -> Role | None:
        """Role of the instance that decodes what the head has prefilled, or None where the head does."""
        return self.decode if self.prefill is not None else None

    @property
    def required(self) -> tuple[Role, ...]:
        """Roles without which the path cannot be taken (E is not among them)."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


def paths(roles: Collection[Role], *, multimodal: bool, fused: bool = False) -> tuple[Path, ...]:
    """All paths that `roles` allow, one per kind of head.

    Args:
        roles: roles to build from (of the layout, or of its live instances).
        multimodal: the request has media items.
        fused: it needs one instance that prefills and decodes (`echo`, `prompt_logprobs`, beam search).
    """
    return _paths(frozenset(roles), multimodal, fused)


@functools.lru_cache(maxsize=256)
def _paths(roles: frozenset[Role], multimodal: bool, fused: bool) -> tuple[Path, ...]:
    encode = multimodal and Role.E in roles
    whole = [Path(False, None, Role.EPD), Path(encode, None, Role.PD)]
    apart = [Path(False, Role.EP, Role.D), Path(encode, Role.P, Role.D)]
    alone = [Path(False, None, Role.EP), Path(encode, None, Role.P)]

    def there(among: list[Path]) -> tuple[Path, ...]:
        return tuple(path for path in among if all(role in roles for role in path.required))

    return there(whole) or there(alone) if fused else there(whole + apart)
