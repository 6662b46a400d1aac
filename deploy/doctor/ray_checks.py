"""What serving on several hosts needs: Ray and its token, a cluster that answers, nodes that are alike and reach each
other, ports that only they reach. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deploy.doctor.facts import Facts, HostFacts, RayFacts
from deploy.doctor.finding import Finding, error, ok, warning
from deploy.doctor.ray_facts import MEMORY_MONITOR, SUBREAPER
from deploy.options.versions import RAY

LEAST_FREE_PORTS = 256
"""Of the range of a node: a stage takes a few, and as many again while another takes its place."""

_INSTALL = f"pip install ray=={RAY} (the extra epd-serve[ray]) on every node"
_TOKEN = (
    "(umask 077; ray get-auth-token --generate) on one node, copy ~/.ray/auth_token to all, "
    "export RAY_AUTH_MODE=token on all"
)


def ray_checks(facts: Facts) -> Iterator[Finding]:
    ray = facts.ray
    yield _installed(ray)
    if not ray.asked:
        return
    yield _authentication(facts)
    if ray.version:
        yield _cluster(ray)
    if ray.hosts:
        yield from _versions(ray.hosts)
        for host in ray.hosts:
            yield from _host(host, ray.ports)


def _installed(ray: RayFacts) -> Finding:
    if not ray.version:
        if ray.asked:
            return error("ray", "not installed", "several hosts are served on it", _INSTALL)
        return ok("ray", "not installed (needed for several hosts)")
    if ray.version != RAY:
        return warning("ray", ray.version, f"what we use of it was tried with {RAY}", _INSTALL)
    return ok("ray", ray.version)


def _authentication(facts: Facts) -> Finding:
    """Ray 2.60 turns it on by itself for clusters of one process only; a node that joins has to be told."""
    name, ray, mode = "ray token", facts.ray, facts.environment.get("RAY_AUTH_MODE", "").lower()
    why = "whoever reaches a port of Ray without a token runs code as this user, on every node"
    if mode not in ("", "token"):
        return error(name, f"RAY_AUTH_MODE={mode}", why, _TOKEN)
    if not ray.token:
        return error(name, "none", why, _TOKEN)
    if ray.token_is_open:
        return error(name, f"{ray.token} may be read by other users", "the token lets them run code as this user",
                     f"chmod 600 {ray.token}")  # fmt: skip
    if not mode:
        return warning(
            name,
            f"{ray.token}, and RAY_AUTH_MODE is not set",
            "nodes and commands that join a cluster show their token only when they are told to",
            "export RAY_AUTH_MODE=token on every node, also where ray start runs",
        )
    return ok(name, ray.token)


def _cluster(ray: RayFacts) -> Finding:
    if ray.refusal:
        return error(
            "ray cluster",
            f"{ray.address}: {ray.refusal}",
            "epd-serve serve --runtime ray starts nodes and stages through it",
            "ray start --head on one machine, ray start --address=HEAD:6379 on the others, with one token; "
            "RAY_ADDRESS=HEAD:6379 where no node runs",
        )
    return ok("ray cluster", f"{len(ray.hosts)} nodes at {ray.address}")


def _versions(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """What differs would show later, as KV links that are refused or features that do not fit. A node that only has
    front doors may lack what stages import."""
    asked = [host for host in hosts if not host.refusal]
    found = {
        name: {host.name: host.versions[name] for host in asked if name in host.versions}
        for name in sorted({name for host in asked for name in host.versions})
    }
    differing = [name for name, by_host in found.items() if len(set(by_host.values())) > 1]
    for name in differing:
        yield error(
            f"{name} of the nodes",
            ", ".join(f"{host} {version}" for host, version in found[name].items()),
            "stages of different versions refuse each other's KV, or read each other's features wrongly",
            "install the same on every node",
        )
    if asked and not differing:
        said = ", ".join(f"{name} {next(iter(by_host.values()))}" for name, by_host in found.items())
        yield ok("versions of the nodes", f"equal on {len(asked)}: {said}")


def _host(host: HostFacts, ports: str) -> Iterator[Finding]:
    if host.refusal:
        yield error(
            f"node {host.name}", host.refusal, "nothing of a deployment can run there", "epd-serve doctor on that node"
        )
        return
    if host.free_ports < LEAST_FREE_PORTS:
        yield warning(
            f"ports of {host.name}",
            f"{host.free_ports} of {ports} are free at {host.address}",
            "every stage there takes some of them",
            "end what listens there (ss -ltnp), or give another range with --node-ports",
        )
    if host.unheard:
        yield error(
            f"ports of {host.name}",
            f"{host.address} is not reached from {', '.join(host.unheard)} at a port of {ports}",
            "front doors and other stages call the stages of this node there",
            f"allow TCP {ports} between the nodes (firewall, network policy); if the address is wrong: "
            "ray start --node-ip-address",
        )
    if host.exposed:
        yield warning(
            f"open ports of {host.name}",
            f"{', '.join(map(str, host.exposed))} of stages answer beyond {host.address}",
            "Mooncake asks nobody who they are: whoever reaches such a port reads and writes features and KV",
            f"drop TCP {', '.join(map(str, host.exposed))} from other networks",
        )
    yield from _settings(host)
    if host.free_ports >= LEAST_FREE_PORTS and not (host.unheard or host.exposed):
        yield ok(f"ports of {host.name}", f"{host.free_ports} of {ports} free, reached from every node")


def _settings(host: HostFacts) -> Iterator[Finding]:
    """Ray's own, said where `ray start` runs: it treats its workers as tasks that may be put off and ended."""
    if host.settings.get(SUBREAPER, "0").lower() in ("1", "true"):
        yield error(
            f"ray on {host.name}",
            f"{SUBREAPER} is on",
            "Ray then ends all that its actors have started, so a restarted actor would end every stage of its node",
            f"unset {SUBREAPER} where ray start runs",
        )
    if host.niceness > 0:
        yield warning(
            f"niceness of {host.name}",
            f"Ray adds {host.niceness} to the niceness of what it starts there",
            "stages inherit it, and wait for whatever else wants a core",
            "export RAY_worker_niceness=0 before ray start",
        )
    if host.settings.get(MEMORY_MONITOR) != "0":
        yield warning(
            f"memory monitor of {host.name}",
            "on: at 95 % of the memory Ray ends its own workers",
            "that frees nothing of the stages, and ends the actors that look after them, again and again",
            f"export {MEMORY_MONITOR}=0 before ray start",
        )
