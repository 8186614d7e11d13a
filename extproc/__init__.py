"""Pointsman: stock Envoy plus an ext_proc sidecar that keeps LLM traffic on the right track."""
