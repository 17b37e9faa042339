"""The chart. `python -m infra.helm.check` lints it, renders it for each values file, and validates what comes out."""
