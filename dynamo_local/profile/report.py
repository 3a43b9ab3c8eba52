"""A profile as one HTML page that stands alone: measured points, the curves that planners go by, and where they guess.

Needs matplotlib (the extra `report`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_local.profile import summary
from dynamo_local.profile.document import Document
from dynamo_local.profile.interpolation import DecodeInterpolator, PrefillInterpolator, interpolators
from dynamo_local.profile.reading import Profile
from dynamo_local.system.pages import STYLE, page_template, svg, write_page

POINTS = 200
"""So many points a curve is drawn with."""
BEYOND = 1.5
"""Prompts are drawn to so many times the longest measured one."""


def write_report(path: Path, profile: Profile, facts: Mapping[str, Any], document: Document | None = None) -> None:
    """Write the page. `facts` are those of `summary.facts_of`, `document` the measurements beside the files.

    Raises `BadInput` without matplotlib, or if the file cannot be written.
    """
    title, rows = f"Engine profile {facts['profile']}", list(_header_rows(facts))
    measured = [] if document is None else sorted(document.points, key=lambda p: (p.kind, p.tokens, p.requests))
    if document is not None:
        rows += [("date", document.date), *(("measured", line) for line in summary.summary_lines(document))]
    shown = {**facts, "facts": rows, "repeated": measured}
    write_page(path, _PAGE.render(title=title, style=STYLE, plot=_plot(profile), **shown))


def _header_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The text above the plots."""
    yield from (("file", file) for file in facts["files"])
    yield "KV cache", f"{facts['max_kv_tokens']:,} tokens"
    prompts, contexts = facts["measured"]["isl"], facts["measured"]["context_length"]
    measured = "prompts of {:g} to {:g} tokens, contexts of {:g} to {:g}"
    yield "measured", measured.format(*prompts, *contexts)
    yield from (("note", note) for note in facts["notes"])


def _plot(profile: Profile) -> str:
    prefill, decode = interpolators(profile)

    def draw(figure: Any) -> None:
        axes = figure.subplots(2, 2)
        _prefill(axes[0][0], profile, prefill)
        _decode(axes[0][1], profile, decode)
        _best(axes[1][0], profile, decode)
        _map(axes[1][1], figure, profile, decode)

    return svg(draw, 11, 9)


def _parted(axis: Any, x: Sequence[float], y: Sequence[float], beyond: Sequence[bool], **style: Any) -> None:
    """A curve that is dashed where it is extrapolated."""
    label = style.pop("label", None)
    inside = [value if not far else float("nan") for value, far in zip(y, beyond, strict=True)]
    outside = [value if far else float("nan") for value, far in zip(y, beyond, strict=True)]
    axis.plot(x, inside, label=label, **style)
    axis.plot(x, outside, linestyle=":", **style)


def _prefill(axis: Any, profile: Profile, model: PrefillInterpolator) -> None:
    points = profile.prefill
    isl = [BEYOND * points.isl[-1] * (n + 1) / POINTS for n in range(POINTS)]
    for other, colour, what, values, measured in (
        (axis, "tab:blue", "TTFT, ms", [model.interpolate_ttft(x) for x in isl], points.ttft_ms),
        (
            axis.twinx(),
            "tab:gray",
            "prompt tokens/s/GPU",
            [model.interpolate_thpt_per_gpu(x) for x in isl],
            points.thpt_per_gpu,
        ),
    ):
        _parted(other, isl, [v.value for v in values], [v.extrapolated for v in values], color=colour)
        other.plot(points.isl, measured, "o", color=colour, markersize=4)
        other.set_ylabel(what, color=colour)
        other.set_ylim(bottom=0)
    axis.set_xlabel("prompt, tokens")
    axis.set_title("prefill: one prompt after the other")
    axis.grid(alpha=0.3)


def _contexts(profile: Profile) -> list[float]:
    return sorted(set(profile.decode.context_length))


def _decode(axis: Any, profile: Profile, model: DecodeInterpolator) -> None:
    points, usages = profile.decode, [(n + 1) / POINTS for n in range(POINTS)]
    for n, context in enumerate(_contexts(profile)):
        kv = points.max_kv_tokens / context
        values = [model.interpolate_itl(usage * kv, context) for usage in usages]
        colour = f"C{n % 10}"
        _parted(
            axis,
            usages,
            [v.value for v in values],
            [v.extrapolated for v in values],
            color=colour,
            label=f"{context:g}",
        )
        rows = zip(points.context_length, points.kv_usage, points.itl_ms, strict=True)
        mine = [(usage, itl) for at, usage, itl in rows if at == context]
        axis.plot([usage for usage, _ in mine], [itl for _, itl in mine], "o", color=colour, markersize=4)
    axis.set_xlabel(f"KV in use, of {points.max_kv_tokens:,} tokens")
    axis.set_ylabel("ITL, ms")
    axis.set_title("decode: latency")
    axis.legend(title="context, tokens", fontsize=7, ncols=2)
    axis.grid(alpha=0.3)


def _best(axis: Any, profile: Profile, model: DecodeInterpolator) -> None:
    highest = 1.1 * max(profile.decode.itl_ms)
    targets = [highest * (n + 1) / POINTS for n in range(POINTS)]
    for n, context in enumerate(_contexts(profile)):
        found = [model.find_best_throughput_per_gpu(target, context) for target in targets]
        values = [best.value if best.attainable else float("nan") for best in found]
        _parted(axis, targets, values, [best.extrapolated for best in found], color=f"C{n % 10}", label=f"{context:g}")
    axis.set_yscale("log")
    axis.set_xlabel("ITL target, ms")
    axis.set_ylabel("tokens/s/GPU")
    axis.set_title("decode: the most within a target")
    axis.legend(title="context, tokens", fontsize=7, ncols=2)
    axis.grid(alpha=0.3, which="both")


def _map(axis: Any, figure: Any, profile: Profile, model: DecodeInterpolator) -> None:
    points, cells = profile.decode, 60
    longest = 1.2 * max(points.context_length)
    usages = [(n + 0.5) / cells for n in range(cells)]
    contexts = [longest * (n + 0.5) / cells for n in range(cells)]
    grid = [[model.interpolate_itl(u * points.max_kv_tokens / c, c) for u in usages] for c in contexts]
    shown = axis.pcolormesh(usages, contexts, [[cell.value for cell in row] for row in grid], rasterized=True)
    axis.contourf(
        usages,
        contexts,
        [[float(cell.extrapolated) for cell in row] for row in grid],
        levels=[0.5, 1.5],
        colors="none",
        hatches=["//"],
    )
    axis.plot(points.kv_usage, points.context_length, "o", color="white", markersize=4, markeredgecolor="black")
    figure.colorbar(shown, ax=axis, label="ITL, ms")
    axis.set_xlabel("KV in use")
    axis.set_ylabel("context, tokens")
    axis.set_title("decode: where it was measured (hatched: extrapolated)")


_PAGE = page_template(
    """<p>Points were measured; lines are what planners go by, dotted where they are extrapolated.</p>
{{ plot | safe }}
{% if repeated %}
<h2>How sure the points are</h2>
<table>
<tr><th>what</th><th>tokens</th><th>cached</th><th>requests</th><th>chunk</th><th>mean, ms</th><th>± (95 %)</th>
<th>repetitions</th></tr>
{% for point in repeated %}
<tr><td>{{ point.kind }}</td><td>{{ point.tokens }}</td><td>{{ point.cached }}</td>
<td>{{ "{:g}".format(point.requests) }}</td><td>{{ point.chunk }}</td><td>{{ "{:.3f}".format(point.mean_ms) }}</td>
<td>{{ "–" if point.half_width_ms is none else "{:.1%}".format(point.half_width_ms / point.mean_ms) }}</td>
<td>{{ point.repetitions | length }}</td></tr>
{% endfor %}
</table>
{% endif %}
<h2>The most that a GPU decodes within an ITL</h2>
<table>
<tr><th>context</th><th>ITL target, ms</th><th>tokens/s/GPU</th><th>requests at once</th><th>ITL, ms</th><th></th></tr>
{% for row in best %}
<tr><td>{{ "{:g}".format(row.context_length) }}</td><td>{{ "{:g}".format(row.itl_target_ms) }}</td>
<td>{{ "{:,.0f}".format(row.thpt_per_gpu) }}</td><td>{{ "{:,.1f}".format(row.concurrency) }}</td>
<td>{{ "{:.2f}".format(row.itl_ms) }}</td>
<td>{{ "not attainable" if not row.attainable else "extrapolated" if row.extrapolated else "" }}</td></tr>
{% endfor %}
</table>
<h2>Prefill</h2>
<table>
<tr><th>prompt</th><th>TTFT measured, ms</th><th>taken</th><th>tokens/s/GPU measured</th><th>taken</th><th></th></tr>
{% for row in prefill %}
<tr><td>{{ "{:g}".format(row.isl) }}</td>
<td>{{ "–" if row.measured_ttft_ms is none else "{:.2f}".format(row.measured_ttft_ms) }}</td>
<td>{{ "{:.2f}".format(row.ttft_ms) }}</td>
<td>{{ "–" if row.measured_thpt_per_gpu is none else "{:,.0f}".format(row.measured_thpt_per_gpu) }}</td>
<td>{{ "{:,.0f}".format(row.thpt_per_gpu) }}</td><td>{{ "extrapolated" if row.extrapolated else "" }}</td></tr>
{% endfor %}
</table>
<h2>Decode</h2>
<table>
<tr><th>context</th><th>KV in use</th><th>requests</th><th>ITL measured, ms</th><th>taken</th>
<th>tokens/s/GPU measured</th><th>taken</th></tr>
{% for row in decode %}
<tr><td>{{ "{:g}".format(row.context_length) }}</td><td>{{ "{:.4f}".format(row.kv_usage) }}</td>
<td>{{ "{:,.1f}".format(row.concurrency) }}</td><td>{{ "{:.2f}".format(row.measured_itl_ms) }}</td>
<td>{{ "{:.2f}".format(row.itl_ms) }}</td><td>{{ "{:,.0f}".format(row.measured_thpt_per_gpu) }}</td>
<td>{{ "{:,.0f}".format(row.thpt_per_gpu) }}</td></tr>
{% endfor %}
</table>"""
)
