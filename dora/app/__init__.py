"""Runs as a library: prepare, build, drive, resume, check and inspect them. Nothing here prints."""

from dora.app.inspection import open_run as open_run
