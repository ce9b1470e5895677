"""Code of the user: loads the function that a configuration names, and finds the line at which it failed.

A function is named as `FILE.py:function` or `module:function`. A file may import the modules beside it, as a script
may, but only while it is loaded: at its top, not in its functions.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from dora.errors import ConfigError

#: Folders that contain the code of Python and of DORA.
_PYTHON = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_DORA = f"{Path(__file__).parent}{os.sep}"
#: Folders of packages that were installed.
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def load_function(spec: str, *, field: str) -> Callable[..., Any]:
    """Import `FILE.py:function`, or `module:function`, also from the working directory. Errors name the config key
    `field`."""
    module_name, _, name = spec.rpartition(":")
    if not module_name or not name:
        raise ConfigError(f"{field}: expected FILE.py:function or module:function, got '{spec}'")
    if module_name == "__main__":
        raise ConfigError(f"{field}: {in_main(name)}")
    if module_name.endswith(".py") and not Path(module_name).is_file():
        raise ConfigError(f"{field}: {module_name}: no such file")
    if os.getcwd() not in sys.path:  # console scripts do not search the working directory
        sys.path.append(os.getcwd())
    try:
        module = _import(module_name)
    except (Exception, SystemExit) as err:  # user code may raise anything; a script may exit
        raise ConfigError(f"{field}: cannot import '{module_name}' ({describe(err)})") from err
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"{field}: {getattr(module, '__file__', module_name)} has no function '{name}'{_meant(name, module)}"
        )
    try:
        inspect.signature(function)
    except ValueError as err:  # most functions written in C have no signature
        raise ConfigError(f"{field}: the arguments of {spec} are unknown; call it in a function of yours") from err
    return function  # type: ignore[no-any-return]


def in_main(name: str) -> str:
    """Say how to move a function out of a notebook or a script."""
    return (
        f"'{name}' is defined in a notebook or the script itself (__main__), where other processes cannot import it; "
        "move it to a file of its own (in a notebook: a cell that begins with %%writefile functions.py) and give "
        f"'functions.py:{name}'"
    )


def _meant(name: str, module: ModuleType) -> str:
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    near = get_close_matches(name, own, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _import(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    for known in [*sys.modules.values()]:
        if _file_of(known) == str(path):
            return known
    spec = importlib.util.spec_from_file_location(_title(path), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _neighbors(path.parent):
        sys.modules[spec.name] = module  # dataclasses resolve their types there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[spec.name]
            raise
    return module


def _file_of(module: object) -> str | None:
    """Return the file of a module, without asking a lazy one, which may import others."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else None


def _title(path: Path) -> str:
    """Return a name for a file as a module. It must not take the place of one that is imported or could be."""
    title = path.stem.replace(".", "_")
    if title not in sys.modules:
        found = importlib.util.find_spec(title)
        if found is None or found.origin == str(path):
            return title
    return f"file_{title}_{zlib.crc32(str(path).encode()):08x}"


class _Neighbors(importlib.abc.MetaPathFinder):
    """Finds modules in a folder. Those of Python come first: a file `random.py` must not break others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or fullname in sys.stdlib_module_names:
            return None
        return PathFinder.find_spec(fullname, [str(self._folder)], target)


@contextmanager
def _neighbors(folder: Path) -> Iterator[None]:
    """While it is open, an import finds the modules in the folder, even if one of another folder has its name."""
    importlib.invalidate_caches()
    finder = _Neighbors(folder)
    hidden = {name: module for name, module in sys.modules.items() if _is_namesake(module, name, folder)}
    for name in hidden:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.modules.update(hidden)


def _is_namesake(module: ModuleType, name: str, folder: Path) -> bool:
    """Return whether a module is from a file of the user, and the folder has another one of that name."""
    file = _file_of(module)
    if not file or file.startswith(_DORA) or _is_of_python(file) or any(part in file for part in _INSTALLED):
        return False
    stem = name.partition(".")[0]
    beside = [folder / f"{stem}.py", folder / stem]
    return any(path.exists() for path in beside) and not any(Path(file).is_relative_to(path) for path in beside)


def describe(err: BaseException, *, of: object = None) -> str:
    """Return the type and the message of an exception, and the line of the user's code that raised it or led to it.

    `of`: the function that was called. If none of its lines was reached, as with wrong arguments, the line of its
    definition is named.
    """
    error = traceback.format_exception_only(err)[-1].strip() or type(err).__name__
    place = place_of_error(err) or definition_of(of)
    return f"{error} ({place})" if place else error


def place_of_error(err: BaseException) -> str:
    """Return the innermost line of the user's own code that an exception came through, as `place_of`."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(err.__traceback__)]
    if isinstance(err, SyntaxError) and err.filename and err.lineno:
        frames.append((err.filename, err.lineno))
    return place_of(frames)


def place_of(frames: Iterable[tuple[str, int]]) -> str:
    """Return the innermost line of the user's own code in frames (file, line), outermost first: "shop.py:12".

    If all frames of user code are in installed packages, it is the outermost of them, where the package was entered. ""
    if all frames belong to Python or DORA.
    """
    foreign = [(file, line) for file, line in frames if not file.startswith((_DORA, "<")) and not _is_of_python(file)]
    own = [place for place in foreign if not any(folder in place[0] for folder in _INSTALLED)]
    if not foreign:
        return ""
    file, line = own[-1] if own else foreign[0]
    return f"{Path(file).name}:{line}"


def _is_of_python(file: str) -> bool:
    return file.startswith(_PYTHON) and not any(folder in file for folder in _INSTALLED)


def stack_of(frame: FrameType | None) -> list[tuple[str, int]]:
    """Return the frames of a stack, as for `place_of`, from its innermost frame."""
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]


def definition_of(function: object) -> str:
    """Return the line at which a function, method or class of the user is defined; "" if it is unknown."""
    if isinstance(function, type):
        function = function.__init__  # type: ignore[misc]
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return place_of([(code.co_filename, code.co_firstlineno)]) if isinstance(code, CodeType) else ""
