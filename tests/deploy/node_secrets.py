"""What makes members of the nodes of a test, in a folder."""

from __future__ import annotations

import secrets
from pathlib import Path

from deploy.runtime.secrets import NAME
from tests.certificates import certificate


def node_secrets(folder: Path) -> Path:
    """As `--node-secrets` wants them. Made in `folder`, which is made."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for made, name in zip(certificate(folder, NAME), ("tls.crt", "tls.key"), strict=True):
        Path(made).chmod(0o600)
        Path(made).rename(folder / name)
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return folder
