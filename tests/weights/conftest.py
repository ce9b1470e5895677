"""The tiny models of the embedded engine's tests."""

from __future__ import annotations

from tests.embedded.conftest import model_a, model_b, reference_b  # noqa: F401 - fixtures
