"""The Grafana dashboards as Python; the JSON beside it is generated."""
