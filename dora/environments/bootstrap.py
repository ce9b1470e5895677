"""Programs of DORA in another Python: one in which DORA is not installed, and of whose packages it may import few.

This module needs no package, as programs in such a Python start others there.
"""

from __future__ import annotations

from pathlib import Path

#: Imports this copy of DORA in any Python, but not the packages that are installed in the same folder.
_BOOTSTRAP = """\
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("dora", sys.argv[1] + "/__init__.py")
sys.modules["dora"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["dora"])
import_module(sys.argv[2]).main()
"""


def command_of(python: str, module: str) -> list[str]:
    """Return the command that runs `main` of a module of DORA in a Python; it may be followed by arguments."""
    return [python, "-c", _BOOTSTRAP, str(Path(__file__).parents[1]), module]
