{{/* Names, labels, images and the effective configuration; what a pod is made of stands in _pod.tpl. */}}

{{- define "pointsman.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "pointsman.fullname" -}}
{{- $name := include "pointsman.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
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
{{- if regexMatch $loopback $config.health.listen -}}
{{- fail (printf "config.health.listen is %s, where no kubelet can ask: leave it out, or take an address of the pod" $config.health.listen) -}}
{{- end -}}
{{- if and (eq .Values.mode "gateway") (regexMatch $loopback $config.server.listen) -}}
{{- fail (printf "config.server.listen is %s, which no Service reaches: leave it out, or take \"0.0.0.0:8080\"" $config.server.listen) -}}
{{- end -}}
{{- if and .Values.podMonitor.enabled (regexMatch $loopback $config.metrics.listen) -}}
{{- fail (printf "podMonitor is enabled, and config.metrics.listen is %s, which Prometheus cannot reach: leave it out" $config.metrics.listen) -}}
{{- end -}}
{{- if and .Values.nativeSidecar (semverCompare "<1.29.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "nativeSidecar needs Kubernetes 1.29, and this is %s: leave it out" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
