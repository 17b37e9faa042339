"""Dashboards as code: `learning`, `flow`, `engines`, `sandboxes`, `cost` declare them, `panels` turns them into Grafana's JSON."""
