"""Plots of sparse_decode records: roofline.svg, cases against the chip's bounds, and ratios.svg, a peer's times over ours."""

from __future__ import annotations

from pathlib import Path

from .bench import PEAKS, label, peers_of, title

# Text stays text and ids are fixed: small files, and the same bytes for the same records.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "mla_cute", "font.size": 9}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False}
OURS, PEER, LIMIT = "#1f6fb4", "#d1701f", "#555555"
MARKERS = {"v32": "o", "model1": "s"}


def pyplot():
    try:
        import matplotlib
    except ImportError as e:
        raise ImportError(f"plots need matplotlib (pip install matplotlib, or this package with [bench]): {e}") from None
    matplotlib.use("agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def write(records: list[dict], folder: Path) -> list[Path]:
    """Both plots, into a folder that is made if need be; ratios.svg only if a record has a peer. Raises ValueError for none."""
    plt = pyplot()
    if not records:
        raise ValueError("plot: needs a record of sparse_decode, got none")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with plt.rc_context(STYLE):
        for name, draw in (("roofline", roofline), ("ratios", ratios)):
            figure = draw(plt, records)
            if figure is None:
                continue
            written.append(folder / f"{name}.svg")
            figure.savefig(written[-1], bbox_inches="tight", metadata={"Date": None})
            plt.close(figure)
    return written


def roofline(plt, records: list[dict]):
    """TFLOPS over FLOP per byte, both axes logarithmic: ours filled, the peer's hollow."""
    figure, ax = plt.subplots(figsize=(8, 4.8))
    points = [(r["tflops"] * 1e3 / r["gbps"], r) for r in records]  # FLOP per byte
    peak = PEAKS.get(records[-1]["gpu"])
    if peak:
        ridge = peak.tflops * 1e3 / peak.gbps
        low, high = min([x for x, _ in points] + [ridge]) / 1.6, max([x for x, _ in points] + [ridge]) * 1.6
        ax.plot([low, ridge, high], [low * peak.gbps / 1e3, peak.tflops, peak.tflops], color=LIMIT, lw=1.2)
        text = {"color": LIMIT, "fontsize": 8, "ha": "right"}
        ax.text(high, peak.tflops * 1.05, f"{peak.tflops:.0f} TFLOPS, {peak.gbps / 1e3:g} TB/s: {records[-1]['gpu']}", **text)
    for kv_format in dict.fromkeys(r["kv_format"] for r in records):
        of_format = [(x, r) for x, r in points if r["kv_format"] == kv_format]
        style = {"marker": MARKERS.get(kv_format, "d"), "s": 22, "linewidths": 0.9}
        x, y = zip(*((x, r["tflops"]) for x, r in of_format))
        ax.scatter(x, y, color=OURS, label=f"{title(of_format[0][1])}, mla_cute", zorder=3, **style)
        for name in dict.fromkeys(name for _, r in of_format for name in peers_of(r)):
            theirs = [(x, r["tflops"] * r["us"] / peers_of(r)[name]["us"]) for x, r in of_format if name in peers_of(r)]
            x, y = zip(*theirs)
            ax.scatter(x, y, facecolors="none", edgecolors=PEER, label=f"{title(of_format[0][1])}, {name}", zorder=2, **style)
    ax.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOPS")
    ax.set_title(f"Sparse decode, {len(records)} cases", loc="left", fontsize=10)
    ax.grid(which="both", lw=0.3, alpha=0.4)
    ax.legend(frameon=False, loc="lower right")
    return figure


def ratios(plt, records: list[dict]):
    """A bar a case, sorted as the records are: the peer's time over ours."""
    rows = [(r, name, peer["us"] / r["us"]) for r in records for name, peer in peers_of(r).items()]
    if not rows:
        return None
    figure, ax = plt.subplots(figsize=(8, 0.9 + 0.19 * len(rows)))
    y, width = range(len(rows)), [ratio for _, _, ratio in rows]
    ax.barh(y, width, color=[OURS if ratio >= 1 else PEER for ratio in width], height=0.7)
    for i, (r, _, ratio) in enumerate(rows):
        ax.text(ratio + 0.01, i, f"{ratio:.2f}  ({r['us']:.0f} us)", va="center", fontsize=7)
    peers = dict.fromkeys(name for _, name, _ in rows)
    names = [label(r) + (f", {name}" if len(peers) > 1 else "") for r, name, _ in rows]
    ax.set_yticks(y, names, fontsize=7)
    ax.axvline(1, color=LIMIT, lw=0.8)
    ax.set(xlim=(0, max([*width, 1]) * 1.15), ylim=(len(rows) - 0.4, -0.6))
    ax.set_title(f"Time of {', '.join(peers)} / time of mla_cute (longer is better for us)", loc="left", fontsize=10)
    return figure
