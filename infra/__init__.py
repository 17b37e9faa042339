"""What the platform runs on: images, dashboards, alert rules, the chart, and the pages of `docs/` that come from code.

`python -m infra.generate` writes everything that is generated; a test fails when it is out of date.
"""
