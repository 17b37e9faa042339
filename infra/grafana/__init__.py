"""Dashboards as code: `learning`, `flow`, `engines` and `sandboxes` declare them, `panels` turns them into Grafana's JSON."""
