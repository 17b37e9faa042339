{{- define "etude.labels" -}}
app.kubernetes.io/name: etude
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{/* Not empty: its engine is SGLang. */}}
{{- define "etude.sglang" -}}
{{- if eq (.service.engine | default "embedded") "sglang" }}yes{{ end }}
{{- end }}

{{- define "etude.image" -}}
{{ .root.Values.images.registry }}etude/{{ .service.image }}{{ if include "etude.sglang" . }}-sglang{{ end }}:{{ .root.Values.images.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* As JSON, for ETUDE_NEIGHBOURS: service -> headless names of its deployments. The console knows itself. */}}
{{- define "etude.neighbours" -}}
{{- $release := .root.Release.Name }}
{{- $found := dict }}
{{- range $name, $service := .root.Values.services }}
{{- if ne $name "console" }}
{{- $kind := $service.module | splitList "." | last }}
{{- $places := get $found $kind | default list }}
{{- $_ := set $found $kind (append $places (printf "%s-%s-pods:8700" $release $name)) }}
{{- end }}
{{- end }}
{{- $found | toJson }}
{{- end }}

{{/* What every service is told; the same names as docker-compose.yml uses. */}}
{{- define "etude.environment" -}}
{{- if not .service.secret }}
{{- range $name, $key := dict "ETUDE_BUS" "bus" "ETUDE_OBJECTS" "objects" }}
{{- $url := index $.root.Values.servers $key }}
{{- if eq $url "secret" }}
- {name: {{ $name }}, valueFrom: {secretKeyRef: {name: {{ $.root.Values.secret }}, key: {{ $key }}}}}
{{- else }}
- {name: {{ $name }}, value: {{ $url | quote }}}
{{- end }}
{{- end }}
- {name: ETUDE_S3_ACCESS_KEY, valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: s3-access-key}}}
- {name: ETUDE_S3_SECRET_KEY, valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: s3-secret-key}}}
{{- end }}
- {name: ETUDE_LOG_LEVEL, value: {{ .root.Values.logLevel }}}
- {name: ETUDE_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: ETUDE_ADVERTISE, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{- if .service.ledger }}
- {name: ETUDE_LEDGER, valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: ledger}}}
{{- end }}
{{- if .service.jobs }}
- {name: ETUDE_JOBS, valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: jobs}}}
{{- end }}
{{- if include "etude.sglang" . }}
- {name: ETUDE_ENGINE, value: sglang}
{{- end }}
{{- if eq .name "console" }}
# Each pod has a state directory of its own: `etude status`, asked for in the console's pod, reads this, too.
- {name: ETUDE_NEIGHBOURS, value: {{ include "etude.neighbours" . | squote }}}
# Without the key a token is made at each start; it lies in the pod, in console/token below the state directory.
- {name: ETUDE_CONSOLE_TOKEN, valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: console-token, optional: true}}}
# Prometheus and the probes ask for the pod's address.
- name: ETUDE_CONSOLE_NAMES
  value: {{ append .root.Values.console.names "$(ETUDE_ADVERTISE)" | toJson | squote }}
{{- end }}
{{- with .root.Values.traces }}
{{- if .share }}
- {name: ETUDE_TRACES, value: {{ .share | quote }}}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ required "traces.endpoint: found none; allowed: http://HOST:PORT of an OpenTelemetry collector" .endpoint | quote }}}
- {name: OTEL_EXPORTER_OTLP_HEADERS, valueFrom: {secretKeyRef: {name: {{ $.root.Values.secret }}, key: otlp-headers, optional: true}}}
{{- range $name, $value := .environment }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $value := .service.environment }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
