"""What the doctor asks of a cluster: an actor on every node, which needs no share of it and ends with the answer."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.doctor.facts import HostFacts, RayFacts
from deploy.doctor.host_probe import HostProbe
from deploy.options.addresses import port_range
from deploy.ray.cluster import RayNode, connect, nodes_alive, require_token
from deploy.runtime.secrets import NodeSecrets
from epd_serve.errors import ConfigError, EpdError

ANSWER_S = 60.0
"""A node starts a process for it, which imports some of ours."""


ASK_S = 240.0
"""For all that is asked: three rounds of answers, and Ray's own waits for a head that is away."""


class _Probe(HostProbe):
    def said(self, secrets: str) -> bytes:
        """All that it knows by itself, in JSON. `secrets`: the folder by which nodes know each other."""
        facts = self.facts()
        try:
            members = NodeSecrets(secrets, "--node-secrets")
            members.check()
            facts = replace(facts, secrets=members.marks())
        except ConfigError as error:
            facts = replace(facts, no_secrets=error.message)
        return msgspec.json.encode(facts)


def ask_cluster(address: str, ports: str, secrets: str, here: RayFacts) -> RayFacts:
    """The facts of this machine, with what the nodes of the cluster at `address` say ("": the one that runs here).

    Args:
        ports: the range for stages. secrets: the folder by which nodes know each other.

    They are asked in a process of their own: where the cluster ends meanwhile, some calls of Ray never return.
    """
    asked = replace(here, asked=True, address=address or "this machine", ports=ports)
    context = multiprocessing.get_context("spawn")
    answer, theirs = context.Pipe(duplex=False)
    asking = context.Process(target=_ask, args=(theirs, address, secrets, asked), name="doctor", daemon=True)
    asking.start()
    theirs.close()
    try:
        if not answer.poll(ASK_S):
            return replace(asked, refusal=f"the cluster has not answered within {ASK_S:g} s")
        told: RayFacts = answer.recv()
        return told
    except EOFError:
        return replace(asked, refusal="Ray has ended the process that asked the cluster")
    finally:
        asking.kill()  # what it has started on the cluster goes with it
        asking.join()
        answer.close()


def _ask(pipe: Connection, address: str, secrets: str, asked: RayFacts) -> None:
    with redirect_stdout(sys.stderr):  # where Ray prints what befalls the cluster; ours carries the findings
        try:
            connect(address)
            require_token()
        except EpdError as error:
            pipe.send(replace(asked, refusal=str(error)))
            return
        found = nodes_alive()
        named = dict(zip(_names(found), found, strict=True))
        pipe.send(replace(asked, hosts=_hosts(named, port_range(asked.ports), secrets)))


def _names(found: Sequence[RayNode]) -> list[str]:
    """Their addresses; where several nodes have one, the beginnings of their ids."""
    addresses = [one.address for one in found]
    return addresses if len(set(addresses)) == len(found) else [one.id[:8] for one in found]


def _hosts(found: Mapping[str, RayNode], ports: range, secrets: str) -> tuple[HostFacts, ...]:
    probes = {
        name: ray.remote(_Probe)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(one.id, soft=False))
        .remote(name, one.address, ports)
        for name, one in found.items()
    }
    said = _answers({name: probe.said.remote(secrets) for name, probe in probes.items()}, _refusing(found))
    facts = {name: msgspec.json.decode(one, type=HostFacts) for name, one in said.items()}
    able = {name: probe for name, probe in probes.items() if not facts[name].refusal}
    listening = _answers({name: probe.listen.remote() for name, probe in able.items()}, lambda name, error: 0)
    reached = _answers(
        {
            (caller, name): probe.reaches.remote(found[name].address, port)
            for caller, probe in able.items()
            for name, port in listening.items()
            if port and caller != name
        },
        lambda pair, error: False,
    )

    def unheard(name: str) -> tuple[str, ...]:
        return tuple(caller for (caller, other), came in reached.items() if other == name and not came)

    return tuple(replace(one, unheard=unheard(name)) for name, one in facts.items())


def _refusing(found: Mapping[str, RayNode]) -> Callable[[str, Exception], bytes]:
    def refused(name: str, error: Exception) -> bytes:
        why = f"it does not answer within {ANSWER_S:g} s" if isinstance(error, GetTimeoutError) else _last_line(error)
        return msgspec.json.encode(HostFacts(name, found[name].address, refusal=why))

    return refused


def _answers(asked: Mapping[Any, Any], otherwise: Callable[[Any, Exception], Any]) -> dict[Any, Any]:
    """What each call says, or what is to be said instead where it fails. All of them have one deadline."""
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
    answers = {}
    for name, reference in asked.items():
        try:
            answers[name] = ray.get(reference, timeout=0.0)
        except (RayError, ImportError) as error:  # GetTimeoutError is one of Ray's
            answers[name] = otherwise(name, error)
    return answers


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
