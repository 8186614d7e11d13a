{{/* Mode extproc: what the manifests for another Envoy need of the configuration; they are in envoy-gateway.yaml and istio.yaml. */}}

{{- define "pointsman.extprocConfig" -}}
{{- $extproc := dict "listen" (printf "0.0.0.0:%v" .Values.extproc.port) "settle" (printf "%vs" .Values.drain.settleSeconds) -}}
{{- if .Values.extproc.tlsSecret -}}
{{- $tls := dict "cert_file" "/etc/pointsman-tls/tls.crt" "key_file" "/etc/pointsman-tls/tls.key" -}}
{{- if .Values.extproc.clientCA -}}
{{- $_ := set $tls "client_ca_file" "/etc/pointsman-tls/ca.crt" -}}
{{- end -}}
{{- $_ := set $extproc "tls" $tls -}}
{{- end -}}
{{- dict "extproc" $extproc | toJson -}}
{{- end -}}

{{/* A duration of the configuration as whole milliseconds. */}}
{{- define "pointsman.ms" -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- $number := trimSuffix $unit . -}}
{{- mulf (float64 $number) (get (dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000) $unit) | floor | int64 -}}
{{- end -}}

{{/* Milliseconds as a duration without fractions and with at most five digits a unit: what the Gateway API reads. */}}
{{- define "pointsman.duration" -}}
{{- $ms := int64 . -}}
{{- $s := div $ms 1000 -}}
{{- $rest := mod $ms 1000 -}}
{{- if or $s (not $rest) }}{{ $s }}s{{ end }}{{ if $rest }}{{ $rest }}ms{{ end -}}
{{- end -}}

{{/* (dict "of" TABLE "key" KEY "default" DURATION): a duration of the configuration, as the Gateway API reads it. */}}
{{- define "pointsman.durationOf" -}}
{{- include "pointsman.duration" (include "pointsman.ms" (get (.of | default dict) .key | default .default)) -}}
{{- end -}}

{{/* The largest body, in bytes. */}}
{{- define "pointsman.maxBody" -}}
{{- $size := dig "server" "max_body" "10MiB" . -}}
{{- $unit := regexFind "[A-Za-z]+$" $size -}}
{{- mulf (float64 (trimSuffix $unit $size)) (get (dict "B" 1 "KB" 1000 "KiB" 1024 "MB" 1000000 "MiB" 1048576 "GB" 1000000000 "GiB" 1073741824) $unit) | floor | int64 -}}
{{- end -}}

{{/* What Envoy gives up on the sidecar after: 600 ms later than the sidecar itself, for a burst. */}}
{{- define "pointsman.messageTimeout" -}}
{{- include "pointsman.duration" (add (include "pointsman.ms" (dig "router" "deadline" "150ms" .) | int64) 600) -}}
{{- end -}}

{{/* (list ROOT ID): a manifest's name for an upstream; an id that no manifest can bear is hashed. */}}
{{- define "pointsman.upstreamName" -}}
{{- $id := index . 1 -}}
{{- printf "%s-%s" (include "pointsman.fullname" (index . 0)) (ternary $id (sha256sum $id | trunc 10) (regexMatch "^[a-z0-9][-a-z0-9]{0,38}[a-z0-9]$|^[a-z0-9]$" $id)) -}}
{{- end -}}

{{/*
The upstreams as JSON, by id: `name`, `host`, `port`, `tls`, `path`, `model`, times, and `ref`, the
Service of extproc.backends if there is one.
*/}}
{{- define "pointsman.upstreams" -}}
{{- $found := dict -}}
{{- range $id, $upstream := (include "pointsman.config" . | fromJson).upstream -}}
{{- $url := urlParse $upstream.base_url -}}
{{- $tls := eq (lower $url.scheme) "https" -}}
{{- $port := regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "443" "80" $tls) | int -}}
{{- $host := regexReplaceAll ":[0-9]+$" $url.host "" | trimPrefix "[" | trimSuffix "]" | lower -}}
{{- $_ := set $found $id (dict
  "name" (default $id $upstream.name) "host" $host "port" $port "tls" $tls "path" (trimSuffix "/" $url.path)
  "isAddress" (regexMatch "^[0-9.]+$|:" $host)
  "inference" (include "pointsman.durationOf" (dict "of" $upstream "key" "inference_timeout" "default" "30s"))
  "connect" (include "pointsman.durationOf" (dict "of" $upstream "key" "connect_timeout" "default" "2s"))
  "parallel" (default 1024 $upstream.max_concurrent_requests | int64)
  "ref" (get $.Values.extproc.backends $id)) -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* The upstream that a request without our header goes to: the first of the default route. */}}
{{- define "pointsman.defaultUpstream" -}}
{{- $config := include "pointsman.config" . | fromJson -}}
{{- $chosen := .Values.extproc.default -}}
{{- if not $chosen -}}
{{- $route := dig "router" "default" "default" $config -}}
{{- range $config.route -}}
{{- if eq .name $route }}{{ $chosen = first .upstreams }}{{ end -}}
{{- end -}}
{{- end -}}
{{- default (keys $config.upstream | sortAlpha | first) $chosen -}}
{{- end -}}

{{/* What a route takes off: an upstream gets x-pointsman-model alone. */}}
{{- define "pointsman.ours" -}}
[x-pointsman-chain, x-pointsman-reason, x-pointsman-route, x-pointsman-upstream]
{{- end -}}

{{/* What the schema cannot say of mode extproc. */}}
{{- define "pointsman.refuseExtproc" -}}
{{- $root := .root -}}
{{- $extproc := $root.Values.extproc -}}
{{- if eq $root.Values.mode "extproc" -}}
{{- if include "pointsman.isDemo" $root -}}
{{- fail "mode extproc needs a config: the demo's models are on the loopback of a pod that has Envoy in it" -}}
{{- end -}}
{{- if $root.Values.podMonitor.envoy -}}
{{- fail "podMonitor.envoy has no Envoy to ask in mode extproc: leave it out" -}}
{{- end -}}
{{- range $name, $value := dict "tls.secret" $root.Values.tls.secret "auth.secret" $root.Values.auth.secret "apiKeyFiles" $root.Values.apiKeyFiles -}}
{{- if $value -}}
{{- fail (printf "%s has no effect in mode extproc, where clients and upstreams talk to another Envoy: remove it, and set it up there" $name) -}}
{{- end -}}
{{- end -}}
{{- range $id, $upstream := .config.upstream -}}
{{- range $key := list "api_key_env" "api_key_file" -}}
{{- if index $upstream $key -}}
{{- fail (printf "config.upstream.%s.%s has no effect in mode extproc: remove it, and let the Envoy in front set the header" $id $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $id, $_ := $extproc.backends -}}
{{- if not (hasKey $.config.upstream $id) -}}
{{- fail (printf "extproc.backends.%s: there is no config.upstream.%s" $id $id) -}}
{{- end -}}
{{- end -}}
{{- if and $extproc.default (not (hasKey .config.upstream $extproc.default)) -}}
{{- fail (printf "extproc.default: there is no config.upstream.%s" $extproc.default) -}}
{{- end -}}
{{- if and $extproc.clientCA (not $extproc.tlsSecret) -}}
{{- fail "extproc.clientCA needs extproc.tlsSecret, whose ca.crt it is" -}}
{{- end -}}
{{- if and (eq $extproc.target "envoy-gateway") (not $extproc.envoyGateway.parentRefs) -}}
{{- fail "extproc.target envoy-gateway needs extproc.envoyGateway.parentRefs: the Gateways to attach to" -}}
{{- end -}}
{{- if and (eq $extproc.target "istio") (not (and $extproc.istio.gateways $extproc.hostnames)) -}}
{{- fail "extproc.target istio needs extproc.istio.gateways and extproc.hostnames" -}}
{{- end -}}
{{- if ne $extproc.target "none" -}}
{{- range $id, $upstream := include "pointsman.upstreams" $root | fromJson -}}
{{- if and (eq $extproc.target "istio") $upstream.isAddress (not $upstream.ref) -}}
{{- fail (printf "config.upstream.%s.base_url is an address, and a ServiceEntry needs a name: give it one, or add extproc.backends.%s" $id $id) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
