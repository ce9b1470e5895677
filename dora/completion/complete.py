"""What a shell may complete: commands, options, settings and their values, from words.json.

The shell's script (dora.bash, dora.zsh, dora.fish) calls `dora --complete` at every Tab. So this imports next to
nothing, and words.json is generated (`python -m dora.cli.words`). The answer has one line with what the shell adds
itself, `files` or `words` (nothing), and one line for each candidate: the word, a tab, and what it means.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

Candidates = list[tuple[str, str]]

_FOLDER: Final = Path(__file__).parent
#: Number of characters of a meaning that are shown.
_WIDTH: Final = 100
SHELLS: Final = ("bash", "zsh", "fish")
#: An index in a key; words.json has 0 for every index.
_INDEX: Final = re.compile(r"(?<=\.)\d+(?=\.)")


def words() -> dict[str, Any]:
    """Return the content of words.json."""
    found: dict[str, Any] = json.loads((_FOLDER / "words.json").read_bytes())
    return found


def script(shell: str) -> str:
    """Return the script that a shell of this kind reads to complete `dora`."""
    return (_FOLDER / f"dora.{shell}").read_text(encoding="utf-8")


def main(argv: Sequence[str]) -> None:
    """Print the candidates: `bash LINE WORDBREAKS`, or `zsh` or `fish` and the words after `dora`, the current one
    last."""
    shell, *rest = argv
    hidden = 0
    if shell == "bash":
        line, breaks = rest
        *before, current = _split(line)
        hidden = max((current.rfind(character) + 1 for character in "=:" if character in breaks), default=0)
    else:
        *before, current = rest
    adds, found = candidates(before, current, words=words())
    lines = [adds, *(f"{word[hidden:]}\t{meaning[:_WIDTH]}" for word, meaning in found)]
    encoding = sys.stdout.encoding or "utf-8"  # which may lack a character of a meaning
    sys.stdout.write("".join(f"{line}\n" for line in lines).encode(encoding, "replace").decode(encoding))


def _split(line: str) -> list[str]:
    """Return the words of a line up to the cursor, without the program; the last one, "" after a space, is current."""
    import shlex

    for closing in ("", "'", '"'):
        try:
            found = shlex.split(f"{line}\0{closing}")
        except ValueError:
            continue
        return [*found[1:-1], found[-1].rstrip("\0")]
    return [""]


def candidates(before: Sequence[str], current: str, *, words: dict[str, Any]) -> tuple[str, Candidates]:
    """Return what the shell adds, and the candidates for the current word after the words before it."""
    commands = words["commands"]
    names = [word for word in before if not word.startswith("-")]
    if not names or names[0] not in commands:
        known = words["options"] if current.startswith("-") else commands
        return "words", [] if names else _matching(current, {name: entry["help"] for name, entry in known.items()})
    command = commands[names[0]]
    options = command["options"]
    if before[-1] in options and options[before[-1]]["takes"]:
        return _values(options[before[-1]], current, words=words)
    name, equals, value = current.partition("=")
    if equals and name in options:
        adds, found = _values(options[name], value, words=words)
        return adds, [(f"{name}={word}", meaning) for word, meaning in found]
    if current.startswith("-"):
        left = {name: entry["help"] for name, entry in options.items() if entry["repeats"] or name not in before}
        return "words", _matching(current, left)
    return command["takes"] or "words", _matching(current, dict.fromkeys(command["values"], ""))


def _values(option: dict[str, Any], current: str, *, words: dict[str, Any]) -> tuple[str, Candidates]:
    if option["takes"] == "setting":
        return _settings(current, words["settings"])
    adds = "files" if option["takes"] == "files" else "words"
    return adds, _matching(current, dict.fromkeys(option["values"], ""))


def _settings(current: str, settings: dict[str, Any]) -> tuple[str, Candidates]:
    """Complete KEY=VALUE: a key part by part, then its value."""
    key, equals, value = current.partition("=")
    if equals:
        found = settings.get(_INDEX.sub("0", key))
        values = dict.fromkeys(found["values"] if found else (), "")
        adds = "files" if found and found["takes"] == "files" else "words"
        return adds, [(f"{key}={word}", "") for word, _ in _matching(value, values)]
    typed = key[: key.rfind(".") + 1]
    prefix, start = _INDEX.sub("0", typed), _INDEX.sub("0", key)
    parts: dict[str, str] = {}
    for full, entry in settings.items():
        if full.startswith(start):
            part, dot, _ = full[len(prefix) :].partition(".")
            word, meaning = (f"{part}.", "") if dot else (f"{part}=", entry["help"])
            parts.setdefault(f"{typed}{word}", meaning)
    return "words", [*parts.items()]


def _matching(current: str, known: dict[str, str]) -> Candidates:
    return [(word, meaning) for word, meaning in known.items() if word.startswith(current)]
