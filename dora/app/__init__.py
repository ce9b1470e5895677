"""Runs as a library: prepared, built, driven, resumed, checked, looked at. Nothing here prints."""

from dora.app.look import open_run as open_run
