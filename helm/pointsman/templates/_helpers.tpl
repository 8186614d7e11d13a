{{/* Names, labels, images and the effective configuration; what a pod is made of stands in _pod.tpl. */}}

{{- define "pointsman.name" -}}
{{- default .Chart.Name .Values.nameOverride -}}
{{- end -}}

{{- define "pointsman.fullname" -}}
{{- $name := include "pointsman.name" . -}}
{{- $full := printf "%s-%s" .Release.Name $name -}}
{{- if .Values.fullnameOverride -}}
{{- $full = .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- $full = .Release.Name -}}
{{- end -}}
{{/* A release's name may have dots, and a Service's none. */}}
{{- $full | replace "." "-" | trunc 50 | trimAll "-" -}}
{{- end -}}

{{- define "pointsman.selectorLabels" -}}
app.kubernetes.io/name: {{ include "pointsman.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "pointsman.labels" -}}
{{ include "pointsman.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* A test's pod is no pod of the gateway: neither Service nor budget nor policy may count it. */}}
{{- define "pointsman.testLabels" -}}
app.kubernetes.io/name: {{ printf "%s-test" (include "pointsman.name" . | trunc 57 | trimSuffix "-") | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Where the gateway's pods may run, its tests may. */}}
{{- define "pointsman.testPlacement" -}}
{{- range $key := list "imagePullSecrets" "nodeSelector" "tolerations" }}
{{- with get $.Values $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "pointsman.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "pointsman.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* (dict "image" IMAGE "tag" TAG): a digest, where there is one, decides. */}}
{{- define "pointsman.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .tag .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Whether nothing was configured, so that the demo with its scripted models is what runs. */}}
{{- define "pointsman.isDemo" -}}
{{- if not .Values.config }}true{{ end -}}
{{- end -}}

{{/* The configuration as JSON: the values' own over what only a cluster needs to be different. */}}
{{- define "pointsman.config" -}}
{{- $needed := dict "server" (dict "listen" "0.0.0.0:8080") "health" (dict "listen" "0.0.0.0:9465") -}}
{{- if .Values.podMonitor.enabled -}}
{{- $_ := set $needed "metrics" (dict "listen" "0.0.0.0:9464") -}}
{{- if .Values.podMonitor.envoy -}}
{{- $_ := set $needed.metrics "envoy_listen" "0.0.0.0:9466" -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.mode "extproc" -}}
{{- $needed = omit $needed "server" | mergeOverwrite (include "pointsman.extprocConfig" . | fromJson) -}}
{{- else -}}
{{- with .Values.tls.secret -}}
{{- $tls := dict "cert_file" "/etc/pointsman-tls/tls.crt" "key_file" "/etc/pointsman-tls/tls.key" -}}
{{- if $.Values.tls.clientCa -}}
{{- $_ := set $tls "client_ca_file" "/etc/pointsman-tls/ca.crt" -}}
{{- end -}}
{{- $_ := set $needed.server "tls" $tls -}}
{{- end -}}
{{- if .Values.auth.secret -}}
{{- $_ := set $needed.server "auth" (dict "keys_file" "/etc/pointsman-auth/keys") -}}
{{- end -}}
{{- end -}}
{{- $given := .Values.config -}}
{{- if include "pointsman.isDemo" . -}}
{{- $given = .Files.Get "files/demo.json" | fromJson -}}
{{- end -}}
{{- mergeOverwrite $needed (deepCopy $given) | toJson -}}
{{- end -}}

{{/* (dict "config" CONFIG "of" TABLE "default" ADDRESS): the port that a listener has. */}}
{{- define "pointsman.port" -}}
{{- $table := get .config .of | default dict -}}
{{- regexFind "[0-9]+$" (get $table "listen" | default .default) -}}
{{- end -}}

{{/* http or https, as clients speak to the Service. */}}
{{- define "pointsman.scheme" -}}
{{- ternary "https" "http" (not (empty (include "pointsman.config" . | fromJson).server.tls)) -}}
{{- end -}}

{{/* A quantity's size in units: 0.5 of "500m". */}}
{{- define "pointsman.quantity" -}}
{{- if kindIs "string" . -}}
{{- $factors := dict "" 1 "m" 0.001 "k" 1e3 "Ki" 1024 "M" 1e6 "Mi" 1048576 "G" 1e9 "Gi" 1073741824 "T" 1e12 "Ti" 1099511627776 -}}
{{- mulf (regexFind "^[0-9.]+" .) (get $factors (regexFind "[A-Za-z]*$" .)) -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* What the schema cannot say, each with its mend. */}}
{{- define "pointsman.refuse" -}}
{{- $config := include "pointsman.config" . | fromJson -}}
{{- $loopback := "^(127\\.|localhost:|\\[::1\\])" -}}
{{- range $id, $upstream := $config.upstream -}}
{{- with $upstream.api_key_env -}}
{{- if not (hasKey $.Values.apiKeys .) -}}
{{- fail (printf "config.upstream.%s.api_key_env is %s, which is not among apiKeys: add apiKeys.%s with secret and key" $id . .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with dig "router" "encoder" "api_key_env" "" $config -}}
{{- if not (hasKey $.Values.apiKeys .) -}}
{{- fail (printf "config.router.encoder.api_key_env is %s, which is not among apiKeys: add apiKeys.%s with secret and key" . .) -}}
{{- end -}}
{{- end -}}
{{- range $id, $upstream := $config.upstream -}}
{{- $name := trimPrefix "/etc/pointsman-keys/" ($upstream.api_key_file | default "") -}}
{{- if and (hasPrefix "/etc/pointsman-keys/" ($upstream.api_key_file | default "")) (not (hasKey $.Values.apiKeyFiles $name)) -}}
{{- fail (printf "config.upstream.%s.api_key_file is %s, which is not among apiKeyFiles: add apiKeyFiles.%s with secret and key" $id $upstream.api_key_file $name) -}}
{{- end -}}
{{- end -}}
{{- if and (or .Values.tls.clientCa .Values.tls.testSecret) (not .Values.tls.secret) -}}
{{- fail "tls.clientCa and tls.testSecret need tls.secret: add it, or leave them out" -}}
{{- end -}}
{{- if and (eq .Values.mode "gateway") (regexMatch "^[0-9]" (include "pointsman.fullname" .)) -}}
{{- fail (printf "the name %s begins with a digit, which a Service's may not: set fullnameOverride" (include "pointsman.fullname" .)) -}}
{{- end -}}
{{- range $part := list "sidecar" "envoy" -}}
{{- $resources := get (get $.Values $part) "resources" -}}
{{- range $name, $limit := $resources.limits -}}
{{- if and (contains "/" $name) (not (regexMatch "^[0-9]+$" (toString $limit))) -}}
{{- fail (printf "%s.resources.limits.%s is %v: of a device there are whole ones only" $part $name $limit) -}}
{{- end -}}
{{- end -}}
{{- range $name, $wanted := $resources.requests -}}
{{- with get ($resources.limits | default dict) $name -}}
{{- if gt (include "pointsman.quantity" $wanted | float64) (include "pointsman.quantity" . | float64) -}}
{{- fail (printf "%s.resources.requests.%s is %v, more than its limit of %v: raise limits.%s, or lower the request" $part $name $wanted . $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if regexMatch $loopback $config.health.listen -}}
{{- fail (printf "config.health.listen is %s, where no kubelet can ask: leave it out, or take an address of the pod" $config.health.listen) -}}
{{- end -}}
{{- if and (eq .Values.mode "gateway") (regexMatch $loopback $config.server.listen) -}}
{{- fail (printf "config.server.listen is %s, which no Service reaches: leave it out, or take \"0.0.0.0:8080\"" $config.server.listen) -}}
{{- end -}}
{{- if and .Values.podMonitor.enabled (regexMatch $loopback $config.metrics.listen) -}}
{{- fail (printf "podMonitor is enabled, and config.metrics.listen is %s, which Prometheus cannot reach: leave it out" $config.metrics.listen) -}}
{{- end -}}
{{- if and .Values.podMonitor.enabled .Values.podMonitor.envoy (regexMatch $loopback $config.metrics.envoy_listen) -}}
{{- fail (printf "podMonitor.envoy is true, and config.metrics.envoy_listen is %s, which Prometheus cannot reach: leave it out" $config.metrics.envoy_listen) -}}
{{- end -}}
{{- include "pointsman.refuseExtproc" (dict "root" . "config" $config) -}}
{{- if and .Values.nativeSidecar (semverCompare "<1.29.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "nativeSidecar needs Kubernetes 1.29, and this is %s: leave it out" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
