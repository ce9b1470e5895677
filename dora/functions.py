"""Code of the user: loads the `module:function` that a configuration names, and finds the line at which it failed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
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
    """Import `module:function`, also from the working directory, or `path/file.py:function`. Errors name the config key
    `field`."""
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{field}: expected module:function, got '{spec}'")
    if module_name == "__main__":
        raise ConfigError(f"{field}: {in_main(name)}")
    if os.getcwd() not in sys.path:  # console scripts do not search the working directory
        sys.path.append(os.getcwd())
    try:
        module = _import(module_name)
    except (Exception, SystemExit) as err:  # user code may raise anything; a script may exit
        raise ConfigError(f"{field}: cannot import '{module_name}' ({describe(err)})") from err
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{field}: {getattr(module, '__file__', module_name)} has no function '{name}'")
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


def _import(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    title = path.stem if known is None else f"file_{path.stem}"  # must not replace the module of another file
    spec = importlib.util.spec_from_file_location(title, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses resolve their types there
    spec.loader.exec_module(module)
    return module


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
