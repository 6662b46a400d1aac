"""What the files of an Ascend installation say: CANN, the driver, the network of the cards. No tool, no framework.

Cheap enough for every start. Where the files lie and what is in them is from recorded installations (CANN 8.0 to 8.5,
drivers 24.1 to 25.3) and the vendor's documentation; none of it has been read on a machine with a card by us.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")  # set by set_env.sh
_DEFAULT_HOMES = ("usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit/latest")  # from 8.5 on, and before
_RUNTIME = "libascendcl.so"
_MACHINE = platform.machine()
_CANN_VERSION = (
    (f"{_MACHINE}-linux/ascend_toolkit_install.info", r"^version=(\S+)"),
    ("ascend_toolkit_install.info", r"^version=(\S+)"),
    ("version.cfg", r"^\w+_running_version=\[[^:\]]*:([^\]]+)\]"),  # [7.6.0.1.220:8.0.0]: inner version, then release
    *((f"{part}/version.info", r"^version_dir=(\S+)") for part in ("runtime", "opp", "toolkit")),
)
"""Files of a toolkit that tell its version, and how."""


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

    @property
    def cann_or_unknown(self) -> str:
        return self.cann or "of an unknown version"

    @property
    def toolkit(self) -> str:
        """The folder with set_env.sh."""
        return self.home.removesuffix("/latest")


def read_ascend(environment: Mapping[str, str], root: Path = Path("/")) -> AscendFiles:
    """Never raises: what cannot be read stays unknown."""
    named = [Path(environment[name]) for name in HOME_VARIABLES if environment.get(name)]
    homes = [*named, *(root / place for place in _DEFAULT_HOMES)]
    home = next((one for one in homes if one.is_dir()), None)
    found = AscendFiles(driver=_driver(root), hccn_conf=bool(read_text(root / "etc/hccn.conf").strip()))
    if home is None:
        return found
    libraries = environment.get("LD_LIBRARY_PATH", "").split(":")
    sourced = home in named or any((Path(one) / _RUNTIME).exists() for one in libraries if one)
    hixl = [*home.glob("lib64/*hixl*.so*"), *home.glob(f"{_MACHINE}-linux/lib64/*hixl*.so*")]
    return replace(found, home=str(home), sourced=sourced, cann=cann_version(home), hixl=bool(hixl))


def cann_version(home: Path) -> str:
    """Of the toolkit below `home`, from the first file that has it; "" where none has."""
    found = (re.search(pattern, read_text(home / file), re.MULTILINE) for file, pattern in _CANN_VERSION)
    return next((one[1].strip('"') for one in found if one is not None), "")


def _driver(root: Path) -> str:
    """The package that installed it says where it lies."""
    place = re.search(r"^Driver_Install_Path_Param=(\S+)", read_text(root / "etc/ascend_install.info"), re.MULTILINE)
    for folder in (place[1].strip('"').lstrip("/") if place is not None else "", "usr/local/Ascend"):
        found = re.search(r"^Version=(\S+)", read_text(root / folder / "driver/version.info"), re.MULTILINE)
        if found is not None:
            return found[1].strip('"')
    return ""


def read_text(path: Path) -> str:
    """Returns what the file says; "" where it cannot be read, for facts that then stay unknown."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
