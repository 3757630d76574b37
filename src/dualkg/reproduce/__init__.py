"""Reproduction: the paper's tables and figures, each number with its recipe, environment and seeds."""

from __future__ import annotations

from dualkg.reproduce.pages import results_page
from dualkg.reproduce.plan import TABLES
from dualkg.reproduce.setting import Setting
from dualkg.reproduce.sheets import Sheet
from dualkg.reproduce.what import REPRODUCTIONS

__all__ = ["REPRODUCTIONS", "TABLES", "Setting", "Sheet", "results_page"]
