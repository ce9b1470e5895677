"""A small MCP server without any package, for the tests: `python mcp_server.py`, or with `--http` at a port it prints.
With `--deaf` it reads nothing any more after its tools were asked for.

Lines of JSON-RPC on stdin and stdout, or POST of one message, which is answered with JSON, by the tools `stream_...`
with events. It knows the handshake of 2025-06-18 alone. Each call is answered by a thread of its own.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TEXT = {"type": "string"}
BARRIER = threading.Barrier(3)
LOCK = threading.Lock()
KEPT = []  # what `keep` was told
NAMES = os.environ.get("NAMES")  # in place of all others


def tool(name, description="", output=None, **properties):
    about = {"name": name, "description": description}
    if output:
        about["outputSchema"] = output
    return {**about, "inputSchema": {"type": "object", "properties": properties, "required": list(properties)}}


TOOLS = [
    tool("echo", "Say it again.", text=TEXT),
    tool("owner", "Say who asks.", text=TEXT, owner=TEXT),
    *(tool(name) for name in ("meet", "fail", "refuse", "image", "huge", "die", "hang", "variables", "pid", "stop")),
    *(tool(name) for name in ("busy", "half")),
    tool("keep", "Keep a word.", word=TEXT),
    *(tool(name) for name in ("status", "forget", "stream_huge", "stream_die")),
]


def say(text, **more):
    return {"result": {"content": [{"type": "text", "text": text}], **more}}


def call(name, arguments):
    match name:
        case "echo":
            return say(arguments["text"])
        case "owner":
            return say(f"{arguments['owner']} says {arguments['text']}")
        case "meet":
            BARRIER.wait(timeout=20)
            return say("met")
        case "fail":
            return say("no such page", isError=True)
        case "refuse":
            return {"error": {"code": -32602, "message": "not with these arguments"}}
        case "busy":
            return {"error": {"code": -32000, "message": "busy, ask later"}}
        case "half":
            return say("half a smile: \ud83d")
        case "image":
            picture = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
            page = {"type": "resource", "resource": {"uri": "file:///a", "text": "a page"}}
            return {"result": {"content": [{"type": "text", "text": "look:"}, picture, page]}}
        case "huge" | "stream_huge":
            return say("x" * (9 << 20))
        case "die" | "stream_die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(1000)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1000)
        case "variables":
            return say(" ".join(sorted(os.environ)))
        case "pid":
            return say(str(os.getpid()))
        case "keep":
            KEPT.append(arguments["word"])
            return say(" ".join(KEPT))
    return {"error": {"code": -32602, "message": f"Unknown tool: {name}"}}


def answer(asked):
    """Return the answer to a request; None to a notification."""
    if "id" not in asked:
        return None
    match asked["method"]:
        case "initialize":
            info = {"name": "small", "version": "1"}
            told = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
            body = {"result": told}
        case "tools/list":  # two pages
            if NAMES is not None:
                body = {"result": {"tools": [tool(name) for name in NAMES.split()]}}
            elif asked.get("params", {}).get("cursor"):
                body = {"result": {"tools": TOOLS[2:]}}
            else:
                body = {"result": {"tools": TOOLS[:2], "nextCursor": "2"}}
        case "tools/call":
            body = call(asked["params"]["name"], asked["params"].get("arguments") or {})
        case "ping":
            body = {"result": {}}
        case _:
            body = {"error": {"code": -32601, "message": "Method not found"}}
    return {"jsonrpc": "2.0", "id": asked["id"], **body}


def answer_line(asked):
    said = answer(asked)
    if said is not None:
        with LOCK:
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if (
            os.environ.get("WANTED_TOKEN")
            and self.headers.get("authorization") != f"Bearer {os.environ['WANTED_TOKEN']}"
        ):
            return self.reply(401, b"who are you?", "text/plain")
        name = asked.get("params", {}).get("name", "")
        if asked["method"] == "tools/call" and name == "status":
            return self.reply(503, b"<p>later</p>", "text/html")
        if name == "forget":
            error = {"code": -32000, "message": "Bad Request: No valid session ID provided"}
            said = {"jsonrpc": "2.0", "id": asked["id"], "error": error}
            return self.reply(400, json.dumps(said).encode(), "application/json")
        said = answer(asked)
        if said is None:
            return self.reply(202, b"", "application/json")
        body = json.dumps(said).encode()
        if name.startswith("stream"):
            body = b"event: message\ndata: " + body + b"\n\n"
        return self.reply(200, body, "text/event-stream" if name.startswith("stream") else "application/json")

    def do_GET(self):
        self.reply(405, b"", "text/plain")

    def reply(self, status, body, kind):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        if status == 200:
            self.send_header("mcp-session-id", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


if __name__ == "__main__":
    if "--http" in sys.argv:
        server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
        sys.stdout.write(f"{server.server_port}\n")
        sys.stdout.flush()
        server.serve_forever()
    sys.stdout.write("a line that is no message\n")
    sys.stdout.flush()
    for line in sys.stdin:
        threading.Thread(target=answer_line, args=(json.loads(line),), daemon=True).start()
        if "--deaf" in sys.argv and '"cursor"' in line:
            os.close(0)
            threading.Event().wait()
