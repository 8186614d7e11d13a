{{/*
Values -> TOML. Helm's own toToml writes whole numbers as 5.0, which a whole-number key refuses, and 1000000 as 1e+06.
A JSON scalar, or an array of them, is TOML too, but for DEL, which JSON leaves as it is.

(dict "path" PATH "table" TABLE): the keys of a table, then its tables, then its arrays of tables.
*/}}
{{- define "pointsman.toml" -}}
{{- $path := .path -}}
{{- range $key, $value := .table }}
{{- if not (or (kindIs "map" $value) (and (kindIs "slice" $value) $value (kindIs "map" (first $value)))) }}
{{ include "pointsman.tomlKey" $key }} = {{ toJson $value | replace "\u007f" "\\u007f" }}
{{- end }}
{{- end }}
{{- range $key, $value := .table }}
{{- $inner := append $path (include "pointsman.tomlKey" $key) }}
{{- if kindIs "map" $value }}

[{{ join "." $inner }}]
{{- include "pointsman.toml" (dict "path" $inner "table" $value) }}
{{- else if and (kindIs "slice" $value) $value (kindIs "map" (first $value)) }}
{{- range $value }}

[[{{ join "." $inner }}]]
{{- include "pointsman.toml" (dict "path" $inner "table" .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "pointsman.tomlKey" -}}
{{- ternary . (toJson .) (regexMatch "^[A-Za-z0-9_-]+$" .) -}}
{{- end -}}
