"""A report as one HTML file that opens without network.

Laws: the page asks nobody for anything, and its policy (CSP) forbids the browser to. Nothing
that comes from a model is markup: the content is JSON in an element that is not run, and the
page's script inserts it as text alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any, Final

from finecast.terminal import safe

_SCRIPTS: Final = ("base.js", "charts.js", "ops.js", "page.js")


def page_of(content: Mapping[str, Any]) -> str:
    """The page of a report's content."""
    style = _text("page.css")
    script = "\n".join(map(_text, _SCRIPTS))
    title = escape(safe(f"{content['model']['name']}: finecast report"))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src 'unsafe-inline';"
        " base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<a class="skip" href="#report">Skip to the report</a>
<header id="top"></header>
<nav id="contents" aria-label="Sections"></nav>
<main id="report" tabindex="-1">
<noscript><p>This page draws its content with a script of its own. Allow scripts for it, or
read its data with <code>finecast report --json</code>.</p></noscript>
</main>
<script type="application/json" id="content">{_embedded(content)}</script>
<script>{script}</script>
</body>
</html>
"""


def _embedded(content: Mapping[str, Any]) -> str:
    """JSON that stands in an element: no ``<`` ends it or opens a comment in it."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(name: str) -> str:
    return (files("finecast_report") / "web" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """The source expression that permits this script and no other."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
