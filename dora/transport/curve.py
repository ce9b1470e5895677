"""Authentication and limits of a run's sockets: CurveZMQ keys and message sizes.

Invariant: a handshake succeeds only between two sides that hold the run's token, and nothing is received before it has
succeeded. The controller's key pair is derived from the token, so that only holders of the token know its "public" key.
Without that key a client cannot form the first command of the handshake, and without the secret key a server cannot
answer it; a recorded handshake cannot be replayed, because each uses keys of one connection. So a rank needs no key of
its own in advance, and the controller needs no list of admitted keys.
"""

from __future__ import annotations

import hashlib
from typing import Any

import zmq
from zmq.utils import z85

from dora.errors import ConfigError

HANDSHAKE_MS = 5_000  # time limit of a handshake, which runs in ZeroMQ's own threads even if the process is busy
# The longest message of a rank lists the files of a version: 1 MiB is some 10,000 of them.
MAX_TO_CONTROLLER_BYTES = 1 << 20
# The largest frame to a rank holds the token ids of a micro-batch: 64 million fit.
MAX_TO_TRAINER_BYTES = 1 << 28
CURVE_BYTES = 64  # upper bound of what encryption adds to a frame

# A weak token can be guessed offline from a recorded handshake; scrypt makes each guess cost 30 ms and 16 MiB.
_SCRYPT = {"n": 1 << 14, "r": 8, "p": 1}


def guard_controller(router: zmq.Socket[Any], token: str) -> None:
    """Admit only holders of the token; call before `bind`."""
    router.setsockopt(zmq.CURVE_SECRETKEY, _controller_key(token))
    router.setsockopt(zmq.CURVE_SERVER, 1)
    _limit(router, MAX_TO_CONTROLLER_BYTES)


def guard_trainer(dealer: zmq.Socket[Any], token: str, *, max_bytes: int = MAX_TO_TRAINER_BYTES) -> None:
    """Connect only to a holder of the token; call before `connect`."""
    dealer.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(_controller_key(token)))
    public, secret = zmq.curve_keypair()
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
    _limit(dealer, max_bytes)


def _controller_key(token: str) -> bytes:
    if not zmq.has("curve"):
        raise ConfigError("pyzmq was built without CURVE; install the wheel of pyzmq from PyPI")
    return z85.encode(hashlib.scrypt(token.encode(), salt=b"dora controller", dklen=32, **_SCRYPT))


def _limit(socket: zmq.Socket[Any], max_bytes: int) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes + CURVE_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
