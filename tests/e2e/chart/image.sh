#!/bin/bash
# Builds the image and, with Envoy inside, a stand-in for Envoy's own, for the chart's tests; it publishes nothing.
#
# Needs podman and buildah. Where no registry answers, the base is a Debian made here by debootstrap,
# under the name that the Dockerfile asks for; docs, manuals and locales are left out, as in the
# slim base.
set -euo pipefail
cd "$(dirname "$0")/../../.."
tools=$PWD/.cache/tools
base=python:3.11-slim-bookworm
mkdir -p "$tools"

# Containers inside containers: no systemd, no more files and processes than the outer one grants.
cat >"$tools/containers.conf" <<'CONF'
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
CONF
export CONTAINERS_CONF=$tools/containers.conf

if ! podman image exists "$base" && ! timeout 60 podman pull --quiet "$base" 2>/dev/null; then
  echo "no registry: making a Debian base"
  root=$(mktemp -d)
  trap 'rm -rf "$root"' EXIT
  debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates \
    bookworm "$root" >/dev/null
  rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/*
  tar -C "$root" -c . | podman import --quiet - "$base"
fi

build() { # TARGET TAG
  # pip inside reaches the index as this machine does.
  buildah bud --pull-never --layers --quiet --format docker --network host \
    -v /etc/ssl/certs:/etc/ssl/certs:ro -v /usr/share/ca-certificates:/usr/share/ca-certificates:ro \
    --target "$1" -t "$2" .
}

build sidecar localhost/pointsman:0.1.0
# The same version of Envoy, and bash, are in both.
podman image exists envoyproxy/envoy:v1.40.0 ||
  timeout 60 podman pull --quiet envoyproxy/envoy:v1.40.0 2>/dev/null ||
  build gateway envoyproxy/envoy:v1.40.0
podman images --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep -E 'pointsman:|envoy:|python:'
