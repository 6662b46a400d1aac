"""How NPUs reach each other, and what of that this layout needs: HCCS, RoCE, alignment, pairs on one NPU. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from deploy.doctor.facts import Facts
from deploy.doctor.finding import Finding, ok, warning
from deploy.options.config import DeployConfig
from deploy.options.versions import SAME_NPU_FROM, series
from deploy.options.ways import draw_ways

_ROCE = "HCCL_INTRA_ROCE_ENABLE"
_POOL = "ASCEND_BUFFER_POOL"
_HCCN = "mount the host's: docker run … -v /etc/hccn.conf:/etc/hccn.conf"


def link_checks(facts: Facts) -> Iterator[Finding]:
    if facts.wanted.device != "npu" or not facts.devices:
        return
    yield from _topology(facts)
    yield from _card_network(facts)
    yield _alignment(facts)
    yield _same_npu(facts)


def _topology(facts: Facts) -> Iterator[Finding]:
    """HCCS is what Mooncake takes inside a server unless it is told to take RoCE."""
    if len(facts.devices) < 2:
        return
    links = facts.links
    if not links.topology:
        yield warning(
            "npu topology",
            f"not known: {links.note or 'npu-smi shows no matrix'}",
            "whether the NPUs are joined by HCCS cannot be told",
            "npu-smi info -t topo",
        )
        return
    kinds = Counter(links.topology.values())
    seen = ", ".join(f"{kind} {count // 2 or 1}×" for kind, count in kinds.most_common())
    if all(kind.startswith("HCCS") or kind in ("SIO", "HCCS_SW") for kind in kinds):
        yield ok("npu topology", f"{seen} between {len(facts.devices)} NPUs")
    else:
        yield warning(
            "npu topology",
            seen,
            "KV and features between NPUs that HCCS does not join go over PCIe and the host, or by RoCE",
            f"put stages that exchange KV on NPUs with HCCS (ASCEND_RT_VISIBLE_DEVICES), or export {_ROCE}=1",
        )


def _card_network(facts: Facts) -> Iterator[Finding]:
    """The NPUs' own network ports: needed by RoCE, and by Mooncake's Ascend transport for its addresses."""
    ascend, ports = facts.ascend, facts.links.ports
    if not ascend.hccn_conf:
        yield warning(
            "card network",
            "/etc/hccn.conf is not there, or empty",
            "Mooncake's Ascend transport reads the NPUs' addresses from it: links between NPUs stay on shared memory",
            _HCCN,
        )
    down = [str(npu) for npu, state in ports.items() if state == "DOWN"]
    unknown = [why for state in ports.values() if state not in ("UP", "DOWN") for why in [state]]
    by_roce = facts.environment.get(_ROCE, "0") not in ("", "0")
    if down and by_roce:
        yield warning(
            "roce ports",
            f"down on NPU {', '.join(down)}, and {_ROCE} is on",
            "transfers inside this server are told to take ports that have no link",
            f"unset {_ROCE}, or connect them (hccn_tool -i {down[0]} -link -g)",
        )
    elif unknown:
        yield warning(
            "roce ports",
            f"not known: {unknown[0]}",
            "needed between servers, and inside one only with RoCE",
            "hccn_tool -i 0 -link -g (it comes with the driver: /usr/local/Ascend/driver/tools)",
        )
    elif ports:
        state = f"down on NPU {', '.join(down)} (needed between servers only)" if down else "up"
        yield ok("roce ports", state)


def _alignment(facts: Facts) -> Finding:
    """Registered memory has to be aligned on HCCS; ours is (`npu_ops/memory.py`), the KV cache is vLLM's."""
    if facts.environment.get(_ROCE, "0") not in ("", "0"):
        return ok("alignment", f"RoCE inside the server ({_ROCE}): registered memory needs no 2 MB alignment")
    pool = facts.environment.get(_POOL, "0:0")
    if pool not in ("", "0:0"):
        return warning(
            "alignment",
            f"{_POOL}={pool}",
            "Mooncake then copies through buffers of its own, which costs what direct writes save",
            f"unset {_POOL} unless registration of the KV cache fails",
        )
    return ok("alignment", "HCCS: our slabs and the KV cache are registered from 2 MB boundaries on")


def _same_npu(facts: Facts) -> Finding:
    cann = series(facts.ascend.cann)
    able = cann is not None and cann >= SAME_NPU_FROM and facts.ascend.hixl
    what = "can connect an NPU with itself (HIXL); off by default" if able else "cannot connect an NPU with itself"
    beside = [way for way in draw_ways(DeployConfig(), "npu", facts.wanted.plans).kv if way.beside]
    pairs = ", ".join(f"{way.sender}→{way.taker}" for way in beside)
    use = f"{pairs}: shared memory" if pairs else "pairs on one NPU take shared memory"
    return ok("pairs on one npu", f"CANN {facts.ascend.cann or '(unknown)'} {what}; {use}")
