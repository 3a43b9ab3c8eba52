"""HTML pages that stand alone: plots as inline SVG, one style, the same bytes for the same numbers.

Plots need matplotlib (the extra `report`).
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template

from dynamo_local.errors import BadInput, how_to_install

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px }
th, td { border: 1px solid #ccc; padding: .2rem .5rem; text-align: right; vertical-align: top }
th:first-child, td:first-child, .words td, .words th { text-align: left }
svg { width: 100%; height: auto }
""".strip()

_PAGES = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)


def page_template(body: str, head: str = "") -> Template:
    """The template of a page: `title`, `style` and a table of `facts` (`(what, value)`) before the body, what is not
    marked safe escaped. `head` stands before the title."""
    return _PAGES.from_string(
        f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{head}<title>{{{{ title }}}}</title>
<style>
{{{{ style | safe }}}}
</style>
</head>
<body>
<h1>{{{{ title }}}}</h1>
<table class="words">
{{% for what, value in facts %}}
<tr><th>{{{{ what }}}}</th><td>{{{{ value }}}}</td></tr>
{{% endfor %}}
</table>
{body}
</body>
</html>
"""
    )


def check_plots(option: str = "--report") -> None:
    """Raise `BadInput` where the library for plots is not installed: better before the work than after it."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise BadInput(f"{option} needs matplotlib: {how_to_install('report')}") from None


def svg(draw: Callable[[Any], None], width: float, height: float) -> str:
    """The drawing of `draw` on a matplotlib figure of that size (inches), as an `<svg>` element."""
    check_plots()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {"svg.hashsalt": "dynamo", "svg.fonttype": "none", "font.size": 9.0, "path.simplify": False}
    with matplotlib.rc_context(style):
        figure = pyplot.figure(figsize=(width, height), layout="constrained")
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    drawn = text.getvalue()
    return drawn[drawn.index("<svg") :]


def write_page(path: Path, html: str) -> None:
    """Whole or not at all: whoever reads meanwhile has the old one. Raises `BadInput` where it cannot be written."""
    made = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():  # /dev/stdout
            path.write_text(html, encoding="utf-8")
            return
        made.write_text(html, encoding="utf-8")
        os.replace(made, path.resolve())
    except OSError as error:
        with contextlib.suppress(OSError):
            made.unlink(missing_ok=True)
        raise BadInput(f"the report {path} cannot be written: {error.strerror}") from error
