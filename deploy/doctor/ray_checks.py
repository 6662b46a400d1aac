"""What serving on several hosts needs: Ray and its token, a cluster that answers, nodes that are alike and reach each
other, ports that only they reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace

from deploy.doctor.check import ERROR, OK, WARNING, Check, Verdict
from deploy.doctor.facts import MEMORY_MONITOR, SUBREAPER, Facts, HostFacts
from deploy.options.versions import RAY

LEAST_FREE_PORTS = 256
"""Of the range of a node: a stage takes a few, and as many again while another takes its place."""

_INSTALL = f"pip install ray=={RAY} (the extra epd-serve[ray]) on every node"
_NO_TOKEN = "whoever reaches a port of Ray without a token runs code as this user, on every node"
_TOKEN = (
    "(umask 077; ray get-auth-token --generate) on one node, copy ~/.ray/auth_token to all, "
    "export RAY_AUTH_MODE=token on all"
)


def _ray(facts: Facts) -> Iterator[SimpleNamespace]:
    version = facts.ray.version
    yield SimpleNamespace(version=version, missed=facts.ray.asked and not version, known=version == RAY)


def _token(facts: Facts) -> Iterator[SimpleNamespace]:
    """Ray 2.60 asks for it by itself in clusters of one process only; a node that joins has to be told."""
    mode = facts.environment.get("RAY_AUTH_MODE", "").lower()
    if facts.ray.asked:
        yield SimpleNamespace(
            mode=mode, refused=mode not in ("", "token"), path=facts.ray.token, is_open=facts.ray.token_is_open
        )


def _cluster(facts: Facts) -> Iterator[SimpleNamespace]:
    ray = facts.ray
    if ray.asked and ray.version:
        yield SimpleNamespace(address=ray.address, refusal=ray.refusal, nodes=len(ray.hosts))


def _silent(facts: Facts) -> list[HostFacts]:
    return [host for host in facts.ray.hosts if host.refusal]


def _asked(facts: Facts) -> list[HostFacts]:
    return [host for host in facts.ray.hosts if not host.refusal]


def _hosts(facts: Facts) -> Iterator[SimpleNamespace]:
    for host in _asked(facts):
        yield SimpleNamespace(
            name=host.name,
            address=host.address,
            free_ports=host.free_ports,
            few_ports=host.free_ports < LEAST_FREE_PORTS,
            unheard=", ".join(host.unheard),
            exposed=", ".join(map(str, host.exposed)),
            reached=not host.unheard and not host.exposed,
            subreaper=host.settings.get(SUBREAPER, "0").lower() in ("1", "true"),
            niceness=host.niceness,
            nice=host.niceness > 0,
            monitored=host.settings.get(MEMORY_MONITOR) != "0",
        )


def _by_name(told: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """What each host says, by name, then by host."""
    names = sorted({name for said in told.values() for name in said})
    return {name: {host: said[name] for host, said in told.items() if name in said} for name in names}


def _unequal(told: Mapping[str, Mapping[str, str]]) -> Iterator[SimpleNamespace]:
    for name, found in _by_name(told).items():
        if len(set(found.values())) > 1:
            yield SimpleNamespace(name=name, found=", ".join(f"{host} {said}" for host, said in found.items()))


def _versions(facts: Facts) -> dict[str, Mapping[str, str]]:
    """By node. One that only has front doors may lack what stages import."""
    return {host.name: host.versions for host in _asked(facts)}


def _differing(facts: Facts) -> Iterator[SimpleNamespace]:
    """What would show later, as KV links that are refused or features that do not fit."""
    return _unequal(_versions(facts))


def _no_members(facts: Facts) -> Iterator[SimpleNamespace]:
    return (SimpleNamespace(name=host.name, refusal=host.no_secrets) for host in _asked(facts) if host.no_secrets)


def _strangers(facts: Facts) -> Iterator[SimpleNamespace]:
    return _unequal({host.name: host.secrets for host in _asked(facts)})


def _alike(facts: Facts) -> Iterator[SimpleNamespace]:
    if (asked := _asked(facts)) and not list(_differing(facts)):
        equal = ", ".join(f"{name} {min(found.values())}" for name, found in _by_name(_versions(facts)).items())
        yield SimpleNamespace(nodes=len(asked), equal=equal)


SEVERAL_HOSTS = (
    Check(
        "ray",
        (
            Verdict(
                ERROR,
                "not installed",
                "several hosts are served on it",
                _INSTALL,
                "missed",
            ),
            Verdict(OK, "not installed (needed for several hosts)", when="not version"),
            Verdict(OK, "{one.version}", when="known"),
            Verdict(WARNING, "{one.version}", f"what we use of it was tried with {RAY}", _INSTALL),
        ),
        _ray,
    ),
    Check(
        "ray token",
        (
            Verdict(
                ERROR,
                "RAY_AUTH_MODE={one.mode}",
                _NO_TOKEN,
                _TOKEN,
                "refused",
            ),
            Verdict(ERROR, "none", _NO_TOKEN, _TOKEN, "not path"),
            Verdict(
                ERROR,
                "{one.path} may be read by other users",
                "the token lets them run code as this user",
                "chmod 600 {one.path}",
                "is_open",
            ),
            Verdict(
                WARNING,
                "{one.path}, and RAY_AUTH_MODE is not set",
                "nodes and commands that join a cluster show their token only when they are told to",
                "export RAY_AUTH_MODE=token on every node, also where ray start runs",
                "not mode",
            ),
            Verdict(OK, "{one.path}"),
        ),
        _token,
    ),
    Check(
        "ray cluster",
        (
            Verdict(
                ERROR,
                "{one.address}: {one.refusal}",
                "epd-serve serve --runtime ray starts nodes and stages through it",
                "ray start --head on one machine, ray start --address=HEAD:6379 on the others, with one token; "
                "RAY_ADDRESS=HEAD:6379 where no node runs",
                "refusal",
            ),
            Verdict(OK, "{one.nodes} nodes at {one.address}"),
        ),
        _cluster,
    ),
    Check(
        "{one.name} of the nodes",
        (
            Verdict(
                ERROR,
                "{one.found}",
                "stages of different versions refuse each other's KV, or read each other's features wrongly",
                "install the same on every node",
            ),
        ),
        _differing,
    ),
    Check(
        "node secrets of {one.name}",
        (
            Verdict(
                ERROR,
                "{one.refusal}",
                "its node process does not begin, or is not taken for a member",
                "put tls.crt, tls.key and token (and ca.crt) there, in the folder of --node-secrets, as on the others",
            ),
        ),
        _no_members,
    ),
    Check(
        "{one.name} of --node-secrets",
        (
            Verdict(
                ERROR,
                "{one.found}",
                "nodes with another one refuse the controller, or are refused",
                "copy {one.name} of one node to all of them, and start the deployment again",
            ),
        ),
        _strangers,
    ),
    Check("versions of the nodes", (Verdict(OK, "equal on {one.nodes}: {one.equal}"),), _alike),
    Check(
        "node {one.name}",
        (
            Verdict(
                ERROR,
                "{one.refusal}",
                "nothing of a deployment can run there",
                "epd-serve doctor on that node",
            ),
        ),
        _silent,
    ),
    Check(
        "ports of {one.name}",
        (
            Verdict(
                WARNING,
                "{one.free_ports} of {facts.ray.ports} are free at {one.address}",
                "every stage there takes some of them",
                "end what listens there (ss -ltnp), or give another range with --node-ports",
                "few_ports",
            ),
            Verdict(
                OK,
                "{one.free_ports} of {facts.ray.ports} free, reached from every node",
                when="reached",
            ),
        ),
        _hosts,
    ),
    Check(
        "ports of {one.name}",
        (
            Verdict(
                ERROR,
                "{one.address} is not reached from {one.unheard} at a port of {facts.ray.ports}",
                "front doors and other stages call the stages of this node there",
                "allow TCP {facts.ray.ports} between the nodes (firewall, network policy); if the address is wrong: "
                "ray start --node-ip-address",
                "unheard",
            ),
        ),
        _hosts,
    ),
    Check(
        "open ports of {one.name}",
        (
            Verdict(
                WARNING,
                "{one.exposed} of stages answer beyond {one.address}",
                "Mooncake asks nobody who they are: whoever reaches such a port reads and writes features and KV",
                "drop TCP {one.exposed} from other networks",
                "exposed",
            ),
        ),
        _hosts,
    ),
    # Ray's own settings, said where `ray start` runs: it treats its workers as tasks that may be put off and ended.
    Check(
        "ray on {one.name}",
        (
            Verdict(
                ERROR,
                f"{SUBREAPER} is on",
                "Ray then ends all that its actors have started, so a restarted actor would end every stage of its "
                "node",
                f"unset {SUBREAPER} where ray start runs",
                "subreaper",
            ),
        ),
        _hosts,
    ),
    Check(
        "niceness of {one.name}",
        (
            Verdict(
                WARNING,
                "Ray adds {one.niceness} to the niceness of what it starts there",
                "stages inherit it, and wait for whatever else wants a core",
                "export RAY_worker_niceness=0 before ray start",
                "nice",
            ),
        ),
        _hosts,
    ),
    Check(
        "memory monitor of {one.name}",
        (
            Verdict(
                WARNING,
                "on: at 95 % of the memory Ray ends its own workers",
                "that frees nothing of the stages, and ends the actors that look after them, again and again",
                f"export {MEMORY_MONITOR}=0 before ray start",
                "monitored",
            ),
        ),
        _hosts,
    ),
)
