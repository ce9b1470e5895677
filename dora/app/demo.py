"""The recorded run that comes with DORA, for `dora view --demo`.

`python -m dora.app.demo DIR` makes its archive, `dora/app/demo.zip`, from a finished run.
"""

from __future__ import annotations

import sys
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Final

from dora.journal.run_folder import RunFolder

_ARCHIVE: Final = files("dora.app") / "demo.zip"
#: Files of a run folder that the page needs.
_KEPT: Final = ("status.json", "metrics.jsonl", "timeline.jsonl", "trajectories.jsonl")


def unpack_demo(home: Path) -> Path:
    """Return the folder of the recorded run, unpacked in `home`."""
    folder = RunFolder(home / "demo")
    with _ARCHIVE.open("rb") as packed, zipfile.ZipFile(packed) as archive:
        archive.extractall(folder.root)
    folder.journal.touch()  # the archive has no journal: it would be too large
    folder.config.touch()
    return folder.root


def pack_demo(folder: RunFolder, archive: Path) -> None:
    """Make the archive; the same run gives the same bytes."""
    with zipfile.ZipFile(archive, "w") as packed:
        for name in _KEPT:
            packed.writestr(zipfile.ZipInfo(name), (folder.root / name).read_bytes(), zipfile.ZIP_DEFLATED, 9)


if __name__ == "__main__":
    pack_demo(RunFolder.open(Path(sys.argv[1])), Path(str(_ARCHIVE)))
