"""Ascend: driver, CANN, whether they fit each other, and the packages on top of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.doctor.ascend_files import AscendFiles
from deploy.doctor.facts import Facts
from deploy.doctor.finding import Finding, error, ok, warning
from deploy.options.versions import ASCEND_SETS, DRIVERS, numbers, series, spelled

_HDK = "hiascend.com/hardware/firmware-drivers"
_MOUNT = "docker run … -v /usr/local/Ascend/driver/version.info:/usr/local/Ascend/driver/version.info"


def ascend_checks(facts: Facts) -> Iterator[Finding]:
    if facts.wanted.device == "npu":
        yield driver(facts.ascend)
        yield cann(facts.ascend)
        yield from driver_and_cann(facts.ascend)
        yield from ascend_packages(facts)


def driver(ascend: AscendFiles) -> Finding:
    if ascend.driver:
        return ok("driver", f"Ascend driver {ascend.driver}")
    return warning(
        "driver",
        "its version is not known: no /usr/local/Ascend/driver/version.info",
        "whether it fits CANN cannot be told; in a container the file has to be mounted",
        _MOUNT,
    )


def cann(ascend: AscendFiles) -> Finding:
    if not ascend.home:
        return error(
            "cann",
            "not found: no ASCEND_HOME_PATH, nothing below /usr/local/Ascend",
            "no NPU library can be loaded without it",
            "install CANN 9.1, or use the image quay.io/ascend/vllm-ascend:v0.23.0.post1",
            stops=True,
        )
    if not ascend.sourced:
        return error(
            "cann",
            f"CANN {ascend.cann or 'of an unknown version'} is at {ascend.home}, but this shell does not know it",
            "libascendcl.so is on no library path: torch_npu cannot be imported",
            f"source {ascend.home.removesuffix('/latest')}/set_env.sh",
            stops=True,
        )
    if not ascend.cann:
        return warning(
            "cann",
            f"the version of {ascend.home} is not known",
            "whether it fits the driver and vllm-ascend cannot be told",
            "check that ASCEND_HOME_PATH names a complete toolkit",
        )
    return ok("cann", f"CANN {ascend.cann}" + (", with HIXL" if ascend.hixl else ""))


def driver_and_cann(ascend: AscendFiles) -> Iterator[Finding]:
    """By the vendor's table (`options/versions.py` names it). A CANN or driver newer than the table is believed."""
    cann, driver = series(ascend.cann), series(ascend.driver)
    if cann is None or driver is None:
        return
    fitting = DRIVERS.get(cann)
    pair = f"CANN {ascend.cann} on driver {ascend.driver}"
    if fitting is None:
        if cann < min(DRIVERS):
            why = f"made for CANN {spelled(max(DRIVERS))}; nothing below {spelled(min(DRIVERS))} was looked at"
            yield warning("driver and cann", pair, why, "install CANN 9.1")
        else:
            yield ok("driver and cann", f"{pair} (newer than the table of pairs that is known here)")
    elif driver in fitting or driver > max(fitting):
        yield ok("driver and cann", pair)
    else:
        yield error(
            "driver and cann",
            pair,
            f"the vendor's table has CANN {spelled(cann)} on drivers {', '.join(map(spelled, fitting))}",
            f"on the host install Ascend HDK {spelled(max(fitting))} or one of those ({_HDK}), or another CANN here",
            stops=True,
        )


def ascend_packages(facts: Facts) -> Iterator[Finding]:
    """vllm-ascend, and what that release is made for."""
    versions = facts.packages.versions
    ascend = versions.get("vllm-ascend")
    missing = [name for name in ("vllm", "vllm-ascend", "torch-npu") if name not in versions]
    if missing:
        yield error(
            "ascend packages",
            f"not installed: {', '.join(missing)}",
            "stages on NPUs are vLLM servers with these packages",
            "pip install 'epd-serve[npu]', or use the image quay.io/ascend/vllm-ascend:v0.23.0.post1",
            stops=True,
        )
        return
    assert ascend is not None
    found = series(ascend)
    wanted = ASCEND_SETS.get(found) if found is not None else None
    if wanted is None:
        yield warning(
            "ascend packages",
            f"vllm-ascend {ascend} with vllm {versions['vllm']}",
            "this was written for and checked against vllm-ascend 0.23.0.post1",
            "pip install vllm==0.23.0 vllm-ascend==0.23.0.post1",
        )
        return
    wrong = [
        f"{name} {versions[name]} (it is made for {version})"
        for name, version in wanted.items()
        if name in versions and not _starts(versions[name], version)
    ]
    if wrong:
        pins = f"vllm=={spelled(numbers(ascend)[:3])} torch-npu=={wanted['torch-npu']} torch=={wanted['torch']}"
        yield error(
            "ascend packages",
            f"vllm-ascend {ascend} beside " + ", ".join(wrong),
            "its compiled operators and its patches of vLLM fit one set of versions",
            f"pip install {pins}",
            stops=True,
        )
    else:
        yield ok("ascend packages", f"vllm-ascend {ascend}, vllm {versions['vllm']}, torch-npu {versions['torch-npu']}")
    cann = series(facts.ascend.cann)
    if cann is not None and cann < (series(wanted["cann"]) or cann):
        yield warning(
            "cann and vllm-ascend",
            f"CANN {facts.ascend.cann} under vllm-ascend {ascend}",
            f"that release is built for CANN {wanted['cann']}: operators may be missing",
            f"install CANN {wanted['cann']}",
        )


def _starts(version: str, wanted: str) -> bool:
    """Whether `2.10.0.post4` is a `2.10.0.post4`, and `0.23.1` a `0.23`; what is behind a `+` is no matter."""
    return numbers(version)[: len(numbers(wanted))] == numbers(wanted)
