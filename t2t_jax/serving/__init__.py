"""A local demo: a page and a JSON endpoint over HTTP (`main.py --mode=serve`)."""
