"""The report: one Markdown file and one figure, rendered from records; nothing in it is typed by hand."""

from fasttrack.report.render import render, render_figure, verdict_sentence

__all__ = ["render", "render_figure", "verdict_sentence"]
