"""Manifests of the Prometheus operator's kinds on stdin: a line for each that its types do not admit.

Run by the Python of `make chart-tools`, which has the types; it knows nothing of the chart.
"""

import sys

import yaml
from cloudcoil.models.prometheus_operator import v1

seen = []
for manifest in yaml.safe_load_all(sys.stdin):
    if not manifest or manifest["apiVersion"] != "monitoring.coreos.com/v1":
        continue
    seen.append(manifest["kind"])
    try:
        model = getattr(v1, manifest["kind"]).model_validate(manifest)
    except ValueError as error:
        sys.exit(str(error))
    # A field that the types do not know is dropped, and so missed here.
    kept = model.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if kept != manifest:
        sys.exit(f"{manifest['kind']}: of {manifest}\nit knows only {kept}")
print(*seen)
