"""What the files of an Ascend installation say: CANN, the driver, the network of the cards. No tool, no framework.

Cheap enough for every start. Where the files lie and what is in them is from recorded installations (CANN 8.0 to 8.5,
drivers 24.1 to 25.3) and the vendor's documentation; none of it has been read on a machine with a card by us.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")  # set by set_env.sh
_DEFAULT_HOMES = ("usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit/latest")  # from 8.5 on, and before
_RUNTIME = "libascendcl.so"


@dataclass(frozen=True)
class AscendFiles:
    """Facts. Paths are kept because a fix names them; none lies in a home directory unless CANN does.

    Attributes:
        home: of CANN, "" where none was found. sourced: the environment names it, or its libraries can be found.
        cann: its version, "" where unknown.
        hixl: its libraries have HIXL.
        driver: version of the driver, "" where the file is not there (a container may lack it).
        hccn_conf: /etc/hccn.conf is there and not empty.
    """

    home: str = ""
    sourced: bool = False
    cann: str = ""
    hixl: bool = False
    driver: str = ""
    hccn_conf: bool = False


def read_ascend(environment: Mapping[str, str], root: Path = Path("/")) -> AscendFiles:
    """Never raises: what cannot be read stays unknown."""
    named = [Path(environment[name]) for name in HOME_VARIABLES if environment.get(name)]
    homes = [*named, *(root / place for place in _DEFAULT_HOMES)]
    home = next((one for one in homes if one.is_dir()), None)
    libraries = environment.get("LD_LIBRARY_PATH", "").split(":")
    return AscendFiles(
        home=str(home) if home is not None else "",
        sourced=home in named or any((Path(one) / _RUNTIME).exists() for one in libraries if one),
        cann=cann_version(home) if home is not None else "",
        hixl=home is not None and _has_hixl(home),
        driver=_driver(root),
        hccn_conf=bool(read_text(root / "etc/hccn.conf").strip()),
    )


def cann_version(home: Path) -> str:
    """Of the toolkit below `home`, from the first file that has it."""
    for folder in (home / f"{platform.machine()}-linux", home):
        if found := _field(folder / "ascend_toolkit_install.info", "version"):
            return found
    # runtime_running_version=[7.6.0.1.220:8.0.0]: inner version, then the release
    if match := re.search(r"^\w+_running_version=\[[^:\]]*:([^\]]+)\]", read_text(home / "version.cfg"), re.MULTILINE):
        return match.group(1)
    for part in ("runtime", "opp", "toolkit"):
        if found := _field(home / part / "version.info", "version_dir"):
            return found
    return ""


def _driver(root: Path) -> str:
    """The package that installed it says where it lies."""
    place = _field(root / "etc/ascend_install.info", "Driver_Install_Path_Param")
    for folder in (root / place.lstrip("/") if place else None, root / "usr/local/Ascend"):
        if folder is not None and (found := _field(folder / "driver/version.info", "Version")):
            return found
    return ""


def _has_hixl(home: Path) -> bool:
    return any(
        True for folder in ("lib64", f"{platform.machine()}-linux/lib64") for _ in (home / folder).glob("*hixl*.so*")
    )


def _field(path: Path, name: str) -> str:
    found = re.search(rf"^{name}=(\S+)", read_text(path), re.MULTILINE)
    return found.group(1).strip('"') if found is not None else ""


def read_text(path: Path) -> str:
    """Returns what the file says; "" where it cannot be read, for facts that then stay unknown."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
