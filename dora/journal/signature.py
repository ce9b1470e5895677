"""The signature of a run's configuration, which proves to a later start that an earlier start of this user wrote it.

A run folder can come from somebody else, and its configuration names commands and functions; nothing else in the folder
does. The signature is the first line of config.toml, a comment, so that a crash leaves the configuration with its own
signature or neither. It has a MAC of the run's id and of the bytes that follow, by each of the signer's keys: one that
is drawn for the user and kept outside of all runs, and one derived from DORA_TOKEN, which works on other machines.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from dora import files, foreign
from dora.errors import ConfigError

_PREFIX: Final = b"# signature: "
_MAX_KEYS: Final = 2
_KEY_BYTES: Final = 32


def sign(config: bytes, *, run_id: str, keys: Sequence[bytes]) -> bytes:
    """Return the contents of config.toml: a line with a MAC by each key, and `config`."""
    macs = [_mac(config, run_id=run_id, key=key) for key in keys]
    return _PREFIX + b" ".join(macs) + b"\n" + config


def is_signed(signed: bytes, *, run_id: str, keys: Sequence[bytes]) -> bool:
    """Return whether one of `keys` has signed these contents of config.toml for this run."""
    line, _, config = signed.partition(b"\n")
    if not line.startswith(_PREFIX):
        return False
    given = line.removeprefix(_PREFIX).split()[:_MAX_KEYS]
    wanted = [_mac(config, run_id=run_id, key=key) for key in keys]
    return any(hmac.compare_digest(one, other) for one in given for other in wanted)


def _mac(config: bytes, *, run_id: str, key: bytes) -> bytes:
    id = run_id.encode("utf-8", "surrogateescape")
    # With the length of the id, no part of a configuration can pass for the end of an id, or the reverse.
    return hmac.new(key, b"%d:%s:%s" % (len(id), id, config), hashlib.sha256).hexdigest().encode()


def token_key(token: str) -> bytes:
    """Derive a key from DORA_TOKEN; slowly, because anyone with a run folder can try tokens on its signature."""
    salt = b"dora run folder"
    return hashlib.scrypt(token.encode("utf-8", "surrogateescape"), salt=salt, n=1 << 14, r=8, p=1, dklen=_KEY_BYTES)


def user_key(home: Path) -> bytes | None:
    """Return the key of this user in its state folder `home`; None if none was drawn.

    ConfigError if others have access to the file, or if it holds no key. OSError if it cannot be read.
    """
    path = _key_file(home)
    try:
        with foreign.open_regular(path) as file:
            found = os.fstat(file.fileno())
            key = file.read(_KEY_BYTES + 1)
    except FileNotFoundError:
        return None
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or len(key) != _KEY_BYTES:
        raise ConfigError(
            f"{path}: is not a key that you alone can read; remove it, and the next start draws another (runs signed "
            "with it then need --trust-folder)"
        )
    return key


def draw_user_key(home: Path) -> None:
    """Draw the key of this user, unless there is one; if several processes try, one succeeds. OSError if that fails."""
    if os.path.lexists(_key_file(home)):
        return
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, drawn = tempfile.mkstemp(dir=home, prefix=".key-")  # exclusive, and for this user only
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(drawn, _key_file(home))
    finally:
        os.unlink(drawn)
    files.sync_folder(home)


def _key_file(home: Path) -> Path:
    return home / "key"
