"""Data sets that several stream tests read."""

from tests.support.datasets import tiny  # noqa: F401
