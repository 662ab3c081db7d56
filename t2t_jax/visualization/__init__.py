"""Figures 3–5: attention weights as figures and as a self-contained HTML page."""
