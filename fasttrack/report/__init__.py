"""The report: one Markdown file and its figures, rendered from records; nothing in it is typed by hand."""

from fasttrack.report.render import render, render_figures, verdict_sentence

__all__ = ["render", "render_figures", "verdict_sentence"]
