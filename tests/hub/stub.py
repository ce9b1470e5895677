"""A stand-in for the Hugging Face hub: the routes that huggingface_hub asks for, over a folder of repositories.

It proves the path that bytes take, not that the hub answers like this. Everything is read from the folder at each
request, so that a test changes repositories and faults by writing files, and learns from log.jsonl what was asked.

    FOLDER/{models,datasets}/OWNER/NAME/refs.json          branch -> commit
    FOLDER/{models,datasets}/OWNER/NAME/COMMIT/...         files
    FOLDER/faults.json                                     `Faults`
    FOLDER/log.jsonl                                       {"method", "path", "range", "status"} per request

Run as `python -m tests.hub.stub FOLDER`; it prints its address.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiohttp import web

_CHUNK: Final = 1 << 16


@dataclass(frozen=True)
class Faults:
    """What goes wrong."""

    answer_after_s: float = 0.0  # of every request to the API
    gated: tuple[str, ...] = ()  # repositories that need the token
    token: str = "good"
    wrong_status: int = 0  # of every request to the API
    cut: dict[str, int] | None = None  # file -> the connection is cut after this number of bytes, in each answer
    pause_s: float = 0.0  # between two chunks of a file


def add(folder: Path, kind: str, name: str, files: dict[str, bytes], *, branch: str = "main") -> str:
    """Store files as a new commit, the newest of the branch; return the commit."""
    digest = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
    home = folder / f"{kind}s" / name
    for path, content in files.items():
        file = home / digest / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    refs = home / "refs.json"
    known = json.loads(refs.read_text()) if refs.exists() else {}
    refs.write_text(json.dumps({**known, branch: digest}))
    return digest


class Stub:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._log])
        app.router.add_get("/api/{kind:models|datasets}/{owner}/{name}", self._info)
        app.router.add_get("/api/{kind:models|datasets}/{owner}/{name}/revision/{revision:.+}", self._info)
        app.router.add_get("/api/{kind:models|datasets}/{owner}/{name}/tree/{revision}", self._tree)
        app.router.add_get("/{kind:datasets}/{owner}/{name}/resolve/{revision}/{path:.+}", self._file)
        app.router.add_get("/{owner}/{name}/resolve/{revision}/{path:.+}", self._file)
        return app

    @property
    def _faults(self) -> Faults:
        path = self._folder / "faults.json"
        return Faults(**json.loads(path.read_text())) if path.exists() else Faults()

    @web.middleware
    async def _log(self, request: web.Request, handler: Any) -> web.StreamResponse:
        status = 0
        try:
            response: web.StreamResponse = await self._faulty(request, handler)
            status = response.status
        except web.HTTPException as err:
            status = err.status
            raise
        finally:
            asked = {"method": request.method, "path": request.path, "range": request.headers.get("Range", "")}
            with (self._folder / "log.jsonl").open("a") as log:
                log.write(json.dumps({**asked, "status": status}) + "\n")
        return response

    async def _faulty(self, request: web.Request, handler: Any) -> web.StreamResponse:
        faults = self._faults
        if request.path.startswith("/api/"):
            await asyncio.sleep(faults.answer_after_s)
            if faults.wrong_status:
                return _error(faults.wrong_status, "", "the hub is unwell")
        repo = f"{request.match_info.get('owner')}/{request.match_info.get('name')}"
        if repo in faults.gated and request.headers.get("Authorization") != f"Bearer {faults.token}":
            return _error(401, "GatedRepo", f"Access to model {repo} is restricted.")
        answer: web.StreamResponse = await handler(request)
        return answer

    def _home(self, request: web.Request) -> Path:
        found = request.match_info
        return self._folder / found.get("kind", "models") / found["owner"] / found["name"]

    def _commit(self, request: web.Request) -> str | None:
        """Return the commit of the revision that is asked for; None if there is none."""
        home, revision = self._home(request), request.match_info.get("revision", "main")
        known = json.loads((home / "refs.json").read_text())
        return revision if (home / revision).is_dir() else known.get(revision)

    def _refusal(self, request: web.Request) -> web.Response | None:
        if not (self._home(request) / "refs.json").exists():
            return _error(404, "RepoNotFound", "Repository not found")
        if self._commit(request) is None:
            return _error(404, "RevisionNotFound", "Invalid rev id")
        return None

    async def _info(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        repo, commit = f"{request.match_info['owner']}/{request.match_info['name']}", self._commit(request)
        return web.json_response({"id": repo, "modelId": repo, "sha": commit, "private": False, "tags": [],
                                  "downloads": 0, "likes": 0, "siblings": []})  # fmt: skip

    async def _tree(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        home = self._home(request) / str(self._commit(request))
        files = sorted(path for path in home.rglob("*") if path.is_file())
        return web.json_response([
            {"type": "file", "path": path.relative_to(home).as_posix(), "size": path.stat().st_size, "oid": _etag(path)}
            for path in files
        ])  # fmt: skip

    async def _file(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        commit, name = str(self._commit(request)), request.match_info["path"]
        path = self._home(request) / commit / name
        if not path.is_file():
            return _error(404, "EntryNotFound", "Entry not found")
        content = path.read_bytes()
        begin = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(path)}"', "Accept-Ranges": "bytes",
                   "Content-Length": str(len(content) - begin)}  # fmt: skip
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        response = web.StreamResponse(status=206 if begin else 200, headers=headers)
        await response.prepare(request)
        if request.method != "HEAD":
            await self._send(request, response, content[begin:], name)
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, content: bytes, name: str) -> None:
        faults = self._faults
        limit = (faults.cut or {}).get(name)
        for begin in range(0, len(content[:limit]), _CHUNK):
            await response.write(content[:limit][begin : begin + _CHUNK])
            await asyncio.sleep(faults.pause_s)
        if limit is not None and limit < len(content):
            assert request.transport is not None
            request.transport.close()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _error(status: int, code: str, text: str) -> web.Response:
    headers = {"X-Error-Message": text, **({"X-Error-Code": code} if code else {})}
    return web.json_response({"error": text}, status=status, headers=headers)


async def _serve(folder: Path) -> None:
    runner = web.AppRunner(Stub(folder).app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    sys.stdout.write(f"http://{host}:{port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
