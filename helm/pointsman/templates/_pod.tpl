{{/*
What a pod is made of, for this chart's Deployment and for the pods of other charts:

  {{ include "pointsman.initContainers" .Subcharts.pointsman }}
  {{ include "pointsman.containers" .Subcharts.pointsman }}
  {{ include "pointsman.volumes" .Subcharts.pointsman }}
  {{ include "pointsman.podAnnotations" .Subcharts.pointsman }}
*/}}

{{/* One uid for both containers: the socket between them opens to its owner only. */}}
{{- define "pointsman.securityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Envoy sends the keys; `pointsman check` and the sidecar only look at them, and the sidecar wants them set. */}}
{{- define "pointsman.env" -}}
{{- range $name, $from := .Values.apiKeys }}
- name: {{ $name | quote }}
  valueFrom:
    secretKeyRef: {name: {{ $from.secret | quote }}, key: {{ $from.key | quote }}}
{{- end }}
{{- end -}}

{{/* (dict "root" . "for" CONTAINER): the Secrets, each only where it is read; mounted whole, so that they are followed. */}}
{{- define "pointsman.secretMounts" -}}
{{- $values := .root.Values -}}
{{- if and $values.tls.secret (ne .for "sidecar") }}
- {name: pointsman-tls, mountPath: /etc/pointsman-tls, readOnly: true}
{{- end }}
{{- if and $values.auth.secret (ne .for "envoy") }}
- {name: pointsman-auth, mountPath: /etc/pointsman-auth, readOnly: true}
{{- end }}
{{- if and $values.apiKeyFiles (ne .for "envoy") }}
- {name: pointsman-keys, mountPath: /etc/pointsman-keys, readOnly: true}
{{- end }}
{{- end -}}

{{- define "pointsman.volumes" -}}
{{- with .Values.tls.secret }}
- name: pointsman-tls
  secret: {secretName: {{ . | quote }}}
{{- end }}
{{- with .Values.auth }}
{{- if .secret }}
- name: pointsman-auth
  secret: {secretName: {{ .secret | quote }}, items: [{key: {{ .key | quote }}, path: keys}]}
{{- end }}
{{- end }}
{{- with .Values.apiKeyFiles }}
- name: pointsman-keys
  projected:
    sources:
      {{- range $name, $from := . }}
      - secret: {name: {{ $from.secret | quote }}, items: [{key: {{ $from.key | quote }}, path: {{ $name }}}]}
      {{- end }}
{{- end }}
- name: pointsman-config
  configMap: {name: {{ include "pointsman.fullname" . | quote }}}
# The socket, the configuration and Envoy's bootstrap as the pod began, and the mark that a drain is on.
- name: pointsman-run
  emptyDir: {medium: Memory, sizeLimit: 32Mi}
{{- if and (eq .Values.mode "extproc") .Values.extproc.tlsSecret }}
- name: pointsman-tls
  secret: {secretName: {{ .Values.extproc.tlsSecret | quote }}, defaultMode: 0444}
{{- end }}
{{- end -}}

{{/* A changed configuration rolls the pods, and so does a changed Secret, where Helm may read it. */}}
{{- define "pointsman.podAnnotations" -}}
checksum/config: {{ printf "%s%s" (include "pointsman.config" .) (.Files.Get "files/drain.sh") | sha256sum }}
{{- if and .Values.rollOnSecretChange .Values.apiKeys }}
{{- $seen := list }}
{{- range $name, $from := .Values.apiKeys }}
{{- $secret := lookup "v1" "Secret" $.Release.Namespace $from.secret }}
{{- $seen = append $seen (dig "data" $from.key "" ($secret | default dict)) }}
{{- end }}
checksum/keys: {{ join "\n" $seen | sha256sum }}
{{- end }}
{{- end -}}

{{- define "pointsman.initContainers" -}}
{{- $extproc := eq .Values.mode "extproc" -}}
# The configuration is checked, and Envoy's bootstrap rendered from it, by the version that will serve it.
- name: pointsman-render
  image: {{ include "pointsman.image" (dict "image" .Values.image "tag" .Chart.AppVersion) | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [/bin/sh, -ec]
  args:
    - |-
      pointsman check /etc/pointsman/pointsman.toml
      # A container that starts again must read what its pod began with: the mounted file follows an upgrade,
      # which is for the next pods, and which may have failed.
      cp /etc/pointsman/pointsman.toml /run/pointsman/pointsman.toml
      {{- if not $extproc }}
      pointsman render /run/pointsman/pointsman.toml --write
      {{- end }}
  {{- with include "pointsman.env" . }}
  env:
    {{- . | nindent 4 }}
  {{- end }}
  resources:
    requests: {cpu: 100m, memory: 128Mi}
    limits: {cpu: "1", memory: 256Mi}
  securityContext:
    {{- include "pointsman.securityContext" . | nindent 4 }}
  volumeMounts:
    - {name: pointsman-config, mountPath: /etc/pointsman, readOnly: true}
    - {name: pointsman-run, mountPath: /run/pointsman}
    {{- with include "pointsman.secretMounts" (dict "root" . "for" "init") }}
    {{- . | trim | nindent 4 }}
    {{- end }}
{{- if and .Values.nativeSidecar (not $extproc) }}
{{ include "pointsman.sidecar" . }}
  restartPolicy: Always
{{- if include "pointsman.isNativeEnvoy" . }}
{{ include "pointsman.envoy" . }}
  restartPolicy: Always
{{- end }}
{{- end }}
{{- end -}}

{{/* A pod needs a container that is no sidecar: in this chart's own it is Envoy. */}}
{{- define "pointsman.isNativeEnvoy" -}}
{{- if and .Values.nativeSidecar (eq .Values.mode "sidecar") }}true{{ end -}}
{{- end -}}

{{- define "pointsman.containers" -}}
{{- $extproc := eq .Values.mode "extproc" -}}
{{- if or $extproc (not .Values.nativeSidecar) }}
{{- include "pointsman.sidecar" . }}
{{ end }}
{{- if not (or $extproc (include "pointsman.isNativeEnvoy" .)) }}
{{- include "pointsman.envoy" . }}
{{- end }}
{{- if include "pointsman.isDemo" . }}
{{ include "pointsman.demo" . }}
{{- end }}
{{- end -}}

{{- define "pointsman.envoy" -}}
{{- $config := include "pointsman.config" . | fromJson -}}
{{- $http := include "pointsman.port" (dict "config" $config "of" "server" "default" "0.0.0.0:8080") -}}
{{- $admin := include "pointsman.port" (dict "config" $config "of" "admin" "default" "127.0.0.1:9901") -}}
- name: envoy
  image: {{ include "pointsman.image" (dict "image" .Values.envoy.image "tag" "") | quote }}
  imagePullPolicy: {{ .Values.envoy.image.pullPolicy }}
  command: [envoy]
  args:
    - --config-path
    - /run/pointsman/envoy.yaml
    - --concurrency
    - {{ .Values.envoy.concurrency | toString | quote }}
    - --log-level
    - {{ .Values.envoy.logLevel | quote }}
    # It says at length that two filters are work in progress, and again when keys change.
    - --component-log-level
    - misc:error
    - --disable-hot-restart
    # From the drain's beginning every answer asks its client to go elsewhere.
    - --drain-strategy
    - immediate
    - --drain-time-s
    - {{ .Values.drain.settleSeconds | toString | quote }}
  {{- with include "pointsman.env" . }}
  env:
    {{- . | nindent 4 }}
  {{- end }}
  ports:
    - {name: http, containerPort: {{ $http }}}
    {{- if and .Values.podMonitor.enabled .Values.podMonitor.envoy }}
    - {name: envoy-metrics, containerPort: {{ regexFind "[0-9]+$" $config.metrics.envoy_listen }}}
    {{- end }}
  {{- if include "pointsman.isNativeEnvoy" . }}
  # The pod's own containers are started behind this one.
  startupProbe:
    {{- if or ($config.server.auth) (dig "tls" "client_ca_file" "" $config.server) }}
    tcpSocket: {port: http}
    {{- else }}
    httpGet: {path: /v1/models, port: http, scheme: {{ include "pointsman.scheme" . | upper }}}
    {{- end }}
    periodSeconds: 1
    timeoutSeconds: 3
    failureThreshold: 60
  {{- end }}
  readinessProbe:
    {{- if or ($config.server.auth) (dig "tls" "client_ca_file" "" $config.server) }}
    # A kubelet has neither key nor certificate; the sidecar's own probe says the rest.
    tcpSocket: {port: http}
    {{- else }}
    # The whole path: Envoy asks the sidecar, and the sidecar answers.
    httpGet: {path: /v1/models, port: http, scheme: {{ include "pointsman.scheme" . | upper }}}
    {{- end }}
    periodSeconds: 5
    timeoutSeconds: 3
    failureThreshold: 2
  # Not a request: the kernel accepts for an Envoy that is busy, so load never kills it.
  livenessProbe:
    tcpSocket: {port: http}
    initialDelaySeconds: 10
    periodSeconds: 10
    timeoutSeconds: 3
    failureThreshold: 6
  lifecycle:
    preStop:
      exec:
        command: [/bin/bash, /etc/pointsman/drain.sh, {{ $admin | quote }}, {{ .Values.drain.settleSeconds | toString | quote }}, {{ .Values.drain.limitSeconds | toString | quote }}]
  resources:
    {{- toYaml .Values.envoy.resources | nindent 4 }}
  securityContext:
    {{- include "pointsman.securityContext" . | nindent 4 }}
  volumeMounts:
    - {name: pointsman-config, mountPath: /etc/pointsman, readOnly: true}
    - {name: pointsman-run, mountPath: /run/pointsman}
    {{- with include "pointsman.secretMounts" (dict "root" . "for" "envoy") }}
    {{- . | trim | nindent 4 }}
    {{- end }}
    {{- with .Values.envoy.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "pointsman.sidecar" -}}
{{- $config := include "pointsman.config" . | fromJson -}}
- name: pointsman
  image: {{ include "pointsman.image" (dict "image" .Values.image "tag" .Chart.AppVersion) | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args: [serve, --config, /run/pointsman/pointsman.toml]
  {{- $env := include "pointsman.env" . }}
  {{- if or $env .Values.sidecar.extraEnv }}
  env:
    {{- with $env }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .Values.sidecar.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  ports:
    {{- if eq .Values.mode "extproc" }}
    - {name: grpc, containerPort: {{ .Values.extproc.port }}}
    {{- end }}
    - {name: health, containerPort: {{ include "pointsman.port" (dict "config" $config "of" "health") }}}
    {{- if .Values.podMonitor.enabled }}
    - {name: metrics, containerPort: {{ include "pointsman.port" (dict "config" $config "of" "metrics") }}}
    {{- end }}
  # The model is warm and the socket open.
  startupProbe:
    httpGet: {path: /readyz, port: health}
    periodSeconds: 1
    timeoutSeconds: 3
    failureThreshold: 120
  readinessProbe:
    httpGet: {path: /readyz, port: health}
    periodSeconds: 5
    timeoutSeconds: 3
    failureThreshold: 2
  # Answered by a thread of its own, which no load delays.
  livenessProbe:
    httpGet: {path: /healthz, port: health}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 3
  {{- if not (or .Values.nativeSidecar (eq .Values.mode "extproc")) }}
  {{- include "pointsman.waitForDrain" . | nindent 2 }}
  {{- end }}
  resources:
    {{- toYaml .Values.sidecar.resources | nindent 4 }}
  securityContext:
    {{- include "pointsman.securityContext" . | nindent 4 }}
  volumeMounts:
    - {name: pointsman-config, mountPath: /etc/pointsman, readOnly: true}
    - {name: pointsman-run, mountPath: /run/pointsman}
    {{- if and (eq .Values.mode "extproc") .Values.extproc.tlsSecret }}
    - {name: pointsman-tls, mountPath: /etc/pointsman-tls, readOnly: true}
    {{- end }}
    {{- with include "pointsman.secretMounts" (dict "root" . "for" "sidecar") }}
    {{- . | trim | nindent 4 }}
    {{- end }}
    {{- with .Values.sidecar.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* All hooks of a pod begin at once: who serves Envoy's last requests ends behind them. */}}
{{- define "pointsman.waitForDrain" -}}
lifecycle:
  preStop:
    exec:
      command: [/bin/sh, -c, "sleep 2; while [ -e /run/pointsman/draining ]; do sleep 0.2; done"]
{{- end -}}

{{/* The demo's scripted models, on the pod's loopback. */}}
{{- define "pointsman.demo" -}}
- name: demo-upstreams
  image: {{ include "pointsman.image" (dict "image" .Values.image "tag" .Chart.AppVersion) | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [python3, -m, extproc.demo]
  args:
    {{- range $id, $upstream := (include "pointsman.config" . | fromJson).upstream }}
    - --listen={{ regexFind "127\\.0\\.0\\.1:[0-9]+" $upstream.base_url }}={{ $id }}
    {{- end }}
  {{- include "pointsman.waitForDrain" . | nindent 2 }}
  resources:
    requests: {cpu: 50m, memory: 64Mi}
    limits: {cpu: 500m, memory: 128Mi}
  securityContext:
    {{- include "pointsman.securityContext" . | nindent 4 }}
  volumeMounts:
    - {name: pointsman-run, mountPath: /run/pointsman, readOnly: true}
{{- end -}}
