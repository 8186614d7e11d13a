"""Manifests against Kubernetes' own schemas: [TEXT, VERSION] a line on stdin, what is wrong on stdout.

Run by the Python of `make chart-tools`, which has the schemas; one process for all, since it is the
start that takes its time. Kinds of other groups have no schema here, and others check them.
"""

import json
import sys

import kubernetes_validate
import yaml

OWN_GROUPS = {"networking.k8s.io"}
"""Kubernetes' own that have a dot in their name; the others with one are CRDs'."""


def fault(text, version):
    for manifest in yaml.safe_load_all(text):
        if not manifest:
            continue
        group = manifest["apiVersion"].partition("/")[0]
        if "." in group and group not in OWN_GROUPS:
            continue
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except (
            kubernetes_validate.ValidationError,
            kubernetes_validate.SchemaNotFoundError,
        ) as error:
            return f"{manifest['kind']} {manifest['metadata']['name']}: {error}"
    return ""


for line in sys.stdin:
    sys.stdout.write(json.dumps(fault(*json.loads(line))) + "\n")
    sys.stdout.flush()
