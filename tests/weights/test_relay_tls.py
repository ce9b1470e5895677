"""Relays that speak TLS, and what they do with those that they cannot verify."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dora.errors import ConfigError
from dora.tls import TlsFiles
from dora.weights.arrival import RelayLimits
from dora.weights.relay import Relay
from dora.weights.source import VersionSource
from dora.weights.store import StoreError
from tests.weights.nodes import BRIEF, FILES, KEY, LIMITS, PIECE, WAIT_S, held, left_in, publish, store_at

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")

NEW = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"


def make(folder: Path, name: str = "IP:127.0.0.1") -> TlsFiles:
    """Files of a node, whose certificate is signed by an authority of its own."""
    folder.mkdir()
    authority = [*NEW.split(), "-keyout", "authority.key", "-out", "authority.pem", "-subj", "/CN=authority"]
    own = [*NEW.split(), "-CA", "authority.pem", "-CAkey", "authority.key", "-keyout", "key.pem", "-out", "own.pem"]
    for command in (authority, [*own, "-subj", "/CN=node", "-addext", f"subjectAltName={name}"]):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return TlsFiles(folder / "own.pem", folder / "key.pem", folder / "authority.pem")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make(tmp_path_factory.mktemp("tls") / "node")


@pytest.fixture(scope="module")
def of_others(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make(tmp_path_factory.mktemp("tls") / "others")


@pytest.fixture(scope="module")
def of_another_host(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make(tmp_path_factory.mktemp("tls") / "elsewhere", name="DNS:elsewhere.example")


async def test_a_version_comes_over_tls(tmp_path: Path, tls: TlsFiles) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker)
    async with asyncio.timeout(WAIT_S), Relay(maker, key=KEY, tls=tls).listening("127.0.0.1", 0) as url:
        assert url.startswith("https://127.0.0.1:")
        await Relay(a, key=KEY, tls=tls, limits=LIMITS).fetch(manifest, lambda: [VersionSource(url, KEY)])
    assert held(a) == FILES


@asynccontextmanager
async def listening(context: ssl.SSLContext | None) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A port, and all that it reads."""
    heard: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1 << 16))
        writer.close()

    async with await asyncio.start_server(hear, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1], heard


async def problem(tmp_path: Path, port: int, tls: TlsFiles | None, *, scheme: str = "https") -> str:
    a = store_at(tmp_path / "a")
    manifest = publish(store_at(tmp_path / "maker"))
    limits = RelayLimits(piece_bytes=PIECE, attempts=1, piece_s=1.0)
    with pytest.raises(StoreError) as caught:
        async with asyncio.timeout(WAIT_S):
            await Relay(a, key="k", tls=tls, limits=limits).fetch(
                manifest, lambda: [VersionSource(f"{scheme}://127.0.0.1:{port}", KEY)]
            )
    assert left_in(a) == []
    return str(caught.value)


@pytest.mark.parametrize("whose", ["another authority", "another host"])
async def test_the_key_is_not_sent_to_a_node_that_cannot_be_verified(
    tmp_path: Path, tls: TlsFiles, of_others: TlsFiles, of_another_host: TlsFiles, whose: str
) -> None:
    shown, trusted = (of_others, tls) if whose == "another authority" else (of_another_host, of_another_host)
    async with listening(shown.to_listen()) as (port, heard):
        assert "certificate verify failed" in await problem(tmp_path, port, trusted)
    assert heard == []


async def test_the_key_is_not_sent_in_plain_text_to_one_that_should_speak_tls(tmp_path: Path, tls: TlsFiles) -> None:
    async with listening(None) as (port, heard):
        await problem(tmp_path, port, tls)
        assert "an address is https://host:port" in await problem(tmp_path, port, tls, scheme="http")
        assert "an address is http://host:port" in await problem(tmp_path, port, None)
    assert all(KEY.encode() not in bytes_ for bytes_ in heard)


async def test_a_node_with_tls_does_not_answer_in_plain_text(tmp_path: Path, tls: TlsFiles) -> None:
    maker = store_at(tmp_path / "maker")
    publish(maker)
    async with Relay(maker, key=KEY, tls=tls).listening("127.0.0.1", 0) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(f"GET /versions/3/config.json HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
        async with asyncio.timeout(WAIT_S):
            assert b"HTTP" not in await reader.read()
        writer.close()


async def test_a_handshake_that_does_not_end_is_ended(tmp_path: Path, tls: TlsFiles) -> None:
    limits = RelayLimits(idle_s=0.2)
    async with Relay(store_at(tmp_path), key=KEY, tls=tls, limits=limits).listening("127.0.0.1", 0) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"\x16\x03\x01\x02")
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
        writer.close()


async def test_a_source_whose_handshake_does_not_end_is_left(tmp_path: Path, tls: TlsFiles) -> None:
    """It sends a byte now and then, each within the time for which a connection may be silent."""
    done = asyncio.Event()

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x16\x03\x03\x40\x00\x02\x00\x3f\x00")  # the beginning of a long ServerHello
        while not done.is_set():
            writer.write(b"\x03")
            await asyncio.sleep(0.05)
        writer.close()

    async with await asyncio.start_server(trickle, "127.0.0.1", 0) as server:
        told = await problem(tmp_path, server.sockets[0].getsockname()[1], tls)
        done.set()
    assert "(TimeoutError)" in told


@pytest.mark.parametrize("missing", ["certificate", "key", "authority"])
async def test_files_that_cannot_be_used_are_one_clear_line(tmp_path: Path, tls: TlsFiles, missing: str) -> None:
    given = {name: getattr(tls, name) for name in ("certificate", "key", "authority")}
    for content in (None, b"", b"noise"):
        path = tmp_path / "file"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"file.*: cannot be used for TLS: ") as caught:
            async with Relay(
                store_at(tmp_path), key=KEY, tls=TlsFiles(**{**given, missing: path}), limits=BRIEF
            ).listening("127.0.0.1", 0):
                pass
        assert len(str(caught.value).splitlines()) == 1
