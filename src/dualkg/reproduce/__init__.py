"""Reproduction: the numbers we publish, each with its recipe, environment and seeds."""
