"""Slow tests of what docs/promises.md promises: kills, malformed inputs, two writers."""
