"""Figures in one quiet style. Each is a Drawing: the figure, its caption, and `save`, which writes PNG and SVG."""

from __future__ import annotations

from dualkg.analysis.figures.ablation import draw_ablation
from dualkg.analysis.figures.plane import draw_planes
from dualkg.analysis.figures.projection import draw_projections
from dualkg.analysis.figures.reliability import draw_reliability
from dualkg.analysis.figures.sparsity import Curve, draw_sparsity
from dualkg.analysis.figures.style import Drawing

__all__ = ["Curve", "Drawing", "draw_ablation", "draw_planes", "draw_projections", "draw_reliability", "draw_sparsity"]
