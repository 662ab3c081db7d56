"""The demo's page: one file of HTML, style and script, which asks for nothing outside this server."""

import functools
import importlib.resources
import re

from t2t_jax.visualization.page import csp_hash


@functools.cache
def page() -> str:
    """The page."""
    return importlib.resources.files("t2t_jax.serving").joinpath("page.html").read_text("utf-8")


@functools.cache
def content_security_policy() -> str:
    """Allows the page's own script and style, requests to this server, and its attention pages in a frame."""
    script, style = (re.search(f"<{tag}>(.*?)</{tag}>", page(), re.DOTALL)[1] for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {csp_hash(script)}; style-src {csp_hash(style)}; connect-src 'self'; "
        "frame-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
