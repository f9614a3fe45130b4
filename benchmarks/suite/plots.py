"""A run as pictures: one SVG for each plot."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from .results import Plot, Run

_OURS, _OTHERS = "#1f6fb2", "#b8bec6"
_MINE = ("deliver", "AsyncDispatcher", "batch handler", "claim()")


def draw(run: Run, folder: Path) -> None:
    """Every plot of the run; those of an earlier run are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    mpl.rcParams.update({"svg.hashsalt": "projector-dedup", "font.size": 9, "svg.fonttype": "path"})
    for section in run.sections:
        for plot in section.plots:
            figure = _bars(plot) if plot.bars else _lines(plot)
            figure.savefig(folder / f"{plot.file}.svg", metadata={"Date": None}, bbox_inches="tight")


def _bars(plot: Plot) -> Figure:
    figure = Figure(figsize=(7.5, 0.6 + 0.27 * len(plot.bars)))
    axes = figure.add_subplot()
    names, values = zip(*plot.bars, strict=True)
    middles = [value.middle for value in values]
    spread = [[v.middle - v.low for v in values], [v.high - v.middle for v in values]]
    colours = [_OURS if name.startswith(_MINE) else _OTHERS for name in names]
    axes.barh(names, middles, color=colours, xerr=spread, error_kw={"ecolor": "#444", "elinewidth": 0.8})
    for position, value in enumerate(values):
        label = f"{value.middle:.2f}" if value.middle < 10 else f"{value.middle:.0f}"
        axes.annotate(label, (value.high, position), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    for at in plot.marks.values():
        axes.axvline(at, color="#444", linewidth=0.8, linestyle=":")
    if plot.logarithmic_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes.set_xlabel(plot.axis)
    return _finished(figure, plot)


def _lines(plot: Plot) -> Figure:
    figure = Figure(figsize=(7.5, 3.6))
    axes = figure.add_subplot()
    for name, points in plot.lines.items():
        xs, lows, middles, highs = zip(*points, strict=True)
        (line,) = axes.plot(xs, middles, marker="o", markersize=3, linewidth=1.4, label=name)
        axes.fill_between(xs, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)
    for label, at in plot.marks.items():
        axes.axhline(at, color="#444", linewidth=0.8, linestyle=":")
        axes.annotate(label, (1, at), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    if plot.logarithmic_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.set_ylim(0, 1.1 * max(point[3] for points in plot.lines.values() for point in points))
    axes.set_xlabel(plot.x_axis)
    axes.set_ylabel(plot.axis)
    if len(plot.lines) > 1:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return _finished(figure, plot)


def _finished(figure: Figure, plot: Plot) -> Figure:
    (axes,) = figure.axes
    axes.set_title(plot.title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
