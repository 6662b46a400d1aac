"""Mooncake: which build, which version, its protocol for NPUs, and whether its master takes our flags. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.doctor.facts import Facts
from deploy.doctor.finding import Finding, error, ok, warning
from deploy.options.mooncake_package import PACKAGES, SECOND_TIER_FROM, install_command, is_older

_UNUSED = "not installed (needed for several hosts)"


def mooncake_checks(facts: Facts) -> Iterator[Finding]:
    device, found = facts.wanted.device, facts.packages.mooncake
    if not found:
        if device == "npu":
            why = "KV between NPUs goes through the host's memory"
            yield warning("mooncake", "not installed", why, install_command(device))
        else:
            yield ok("mooncake", _UNUSED)
        return
    seen = ", ".join(f"{one.name} {one.version or '(built from source)'}" for one in found)
    if len(found) > 1:
        names = " ".join(one.name for one in found)
        why = "builds of one package overwrite each other's files"
        yield error("mooncake", seen, why, f"pip uninstall -y {names} && {install_command(device)}")
        return
    (package,) = found
    if device == "npu" and package.name not in (PACKAGES["npu"], "mooncake"):
        why = "this build has no protocol `ascend`: NPUs cannot use it"
        yield error("mooncake", seen, why, f"pip uninstall -y {package.name} && {install_command(device)}")
    elif not facts.machine.libibverbs:
        yield warning(
            "mooncake", f"{seen}, but no libibverbs", "it does not load without", "apt-get install libibverbs1"
        )
    elif is_older(package) and device != "npu":  # which have no second tier
        why = f"the second tier of the MM Store wants {SECOND_TIER_FROM}"
        yield warning("mooncake", seen, why, install_command(device))
    else:
        yield ok("mooncake", seen + (", protocol ascend" if device == "npu" else ""))
    if device != "npu":
        yield from _master(facts)


def _master(facts: Facts) -> Iterator[Finding]:
    master, device = facts.master, facts.wanted.device
    if not master.found:
        where = f"{install_command(device)}, or give --mooncake-master HOST:PORT"
        yield warning("mooncake_master", "not on PATH", "no second tier of our own can be started", where)
    elif master.unknown_flags:
        flags = ", ".join(f"--{flag}" for flag in master.unknown_flags)
        why = "it would end at once: no second tier of our own"
        yield warning("mooncake_master", f"does not know {flags}", why, install_command(device))
    elif master.note:
        yield warning(
            "mooncake_master", master.note, "whether it takes our flags is not known", "mooncake_master --help"
        )
    else:
        yield ok("mooncake_master", "takes our flags")
